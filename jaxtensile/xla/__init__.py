"""What XLA says: the compiler of an absent device, and the bytes and the text of what it compiled."""
