"""The backend for ``torch.compile``: compiles Dynamo's graphs so that their steps stay within the budget."""
