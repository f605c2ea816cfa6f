"""Reinforcement learning: rewards, advantages, rollouts and the loop."""
