//! Saves to a local disk, and copies each step to a shared one.

use ringstow::{CheckpointManager, OnDamage, Retention, StateDict, Tiers};

#[allow(missing_docs)]
pub fn main() -> ringstow::Result<()> {
    let there = Retention { last: Some(20), ..Retention::default() }; // the newest 20 stay on the shared disk
    let places = vec!["shared/run".into()];
    let tiers = Tiers { places, keep: there, keep_here: Some(2), ..Tiers::default() };
    let mut manager = CheckpointManager::found("nvme/run", Retention::default())?.tiers(tiers)?;
    let restored = manager.restore(None, OnDamage::Raise)?; // the newest step of all places
    let next = restored.map_or(1, |restored| restored.step + 1);
    for step in next..next + 3 {
        let mut state = StateDict::new();
        state.value("step", step);
        manager.save_async(step, state, [("loss", 1.0 / step as f64)])?;
    }
    manager.wait_promoted()
}
