"""Engines that hold and update the weights during training: plain torch or DeepSpeed."""
