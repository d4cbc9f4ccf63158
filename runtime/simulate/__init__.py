"""Devices, links, processes and a clock that are not there, under the coordinator that is."""
