"""The chunked loss: the projection, the loss and their gradients in chunks of rows."""
