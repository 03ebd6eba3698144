"""Launch scripts and configs of other trainers, turned into configs of this one."""
