"""What does the coordinator gain, and how fast is it?"""
