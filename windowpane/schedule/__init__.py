"""Requests, and the steps that compute them under a token budget. Without torch."""
