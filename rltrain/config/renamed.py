"""Names that config files of earlier versions have, each with what is written now: a key, or a value as key=value."""

RENAMED = {
    "loss.importance_cap": "loss.correction.high",
    "loss.tis_clip": "loss.correction.high",
    "critic.critic_only_steps": "critic.critic_warmup_steps",
    "weight_sync.transport=golden": "full_gather",
}
