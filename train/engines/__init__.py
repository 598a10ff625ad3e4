"""What holds and updates the weights during training: plain torch or DeepSpeed."""
