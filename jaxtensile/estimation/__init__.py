"""How many bytes does a job need, before it runs and without its device?"""
