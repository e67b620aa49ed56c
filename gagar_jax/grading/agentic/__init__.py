"""A grader that is an agent: it reads a group's workspace through tools and submits one verdict.

workspace   what may be read: every candidate's tree, patch, transcript and facts, under anonymous names
toolbox     the tools over it, and how whatever a candidate wrote is fenced off
submission  the verdict's strict schema
endpoint    one OpenAI-compatible chat endpoint, with deadlines and a spending cap
grader      the conversation, its budgets, and the check that order does not matter
"""
