"""Replicas and their life: the replica link, local engine processes, health and restart.

Imports ``engine`` only by starting it as a process, and the floor.
"""
