"""The chunked loss: computes the projection, the loss and their gradients in chunks of rows."""
