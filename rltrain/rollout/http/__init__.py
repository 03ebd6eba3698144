"""Engines that somebody else runs: samples go to servers at URLs, weights reach them by their own means."""
