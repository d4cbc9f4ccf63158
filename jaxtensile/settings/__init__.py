"""Which options does a function get: its code's, the config's, or the defaults?"""
