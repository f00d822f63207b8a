"""The backend: from Dynamo's graph to compiled code within the budget."""
