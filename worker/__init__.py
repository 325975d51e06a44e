"""The worker: jobs from Redis to the engine, tokens from the engine to Redis.

It imports the parent side of `inferq.engine` and `inferq.producer`, never a model library. It begins in `main.py`.
"""
