"""SQL for `Ledger.forget`: delete payloads and prompts that ``store.keep_payloads`` does not keep, and find the first
group that still has some."""

from __future__ import annotations

FORGET_UNTRAINED = """
    DELETE FROM payloads WHERE key IN (
        SELECT key FROM trajectories WHERE key >= ? AND state IN ('filtered', 'expired', 'failed'))
"""
FORGET_TRAINED = """
    DELETE FROM payloads WHERE key IN (SELECT key FROM trajectories WHERE key >= ? AND trained_step <= ?)
"""
FORGET_PROMPTS = """
    UPDATE groups SET prompt_token_ids = NULL, seal = seal(key, id, prompt_id, members, admitted_version, NULL)
    WHERE key >= ? AND NOT EXISTS (
        SELECT 1 FROM trajectories WHERE key >= groups.key AND key < groups.key + members
            AND (state IN ('in_flight', 'buffered') OR trained_step > ?))
"""
UNSETTLED = """
    SELECT min(group_key) FROM trajectories
    WHERE key >= ? AND (state IN ('in_flight', 'buffered') OR trained_step > ?)
"""
