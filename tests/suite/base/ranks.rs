//! Ranks that save with a base: each links the files whose tensors it has.

use crate::base::*;
use ringstow::{Receipt, Session};

impl Run {
    fn save_by(&self, ranks: u32, step: i64, base: Base) -> Vec<SaveReport> {
        let (dir, state) = (self.at(step), state(step));
        let session = Session::begin(&dir, ranks, self.runtime.config()).unwrap();
        let write = |rank| -> (Receipt, SaveReport) {
            let mut share = state.share((rank, ranks)).unwrap();
            share.base(base.clone());
            let job = Arc::default();
            ringstow::internals::store::write_rank(&self.runtime, &share, rank, &dir, &job).unwrap()
        };
        let (receipts, reports): (Vec<_>, Vec<_>) = (0..ranks).map(write).unzip();
        // As the trainer sends them.
        let sent = receipts.iter().map(|receipt| Receipt::decode(&receipt.encode()));
        session.commit(sent.map(Result::unwrap).collect(), state.tree()).unwrap();
        reports
    }
}

fn linked(reports: &[SaveReport]) -> u64 {
    reports.iter().map(|report| report.linked_bytes).sum()
}

#[test]
fn ranks_link_their_own_shares() {
    let run = Run::new(small_config());
    assert_eq!(linked(&run.save_by(2, 1, Base::none())), 0);
    // Rank 0 has two tensors, of which none ever changes; rank 1 has the one that does.
    assert_eq!(linked(&run.save_by(2, 2, Base::at(run.at(1)))), 4096 + 42_288);
    assert_eq!(linked(&run.save_by(2, 3, Base::at(run.at(2)))), 2 * 4096 + 42_293);
    run.check(1..4);
}

#[test]
fn ranks_link_what_another_number_of_ranks_has_saved() {
    let run = Run::of(1..=2);
    // All unchanged tensors are in one file, of which each of two ranks has a part.
    assert_eq!(linked(&run.save_by(2, 3, Base::at(run.at(2)))), 0);
    assert!(linked(&run.save_by(2, 4, Base::at(run.at(3)))) > 40_000);
    run.check(3..5);
    // One process has the tensors of both.
    assert!(run.save(5, Base::at(run.at(4))).unwrap().linked_bytes > 40_000);
    assert!(shared(&run.at(4), &run.at(5)) > 1);
    run.check(3..6);
}

#[test]
fn regions_are_linked_only_at_their_place() {
    use ringstow::{Dtype, Region, TensorInfo};
    let run = Run::new(small_config());
    let save = |step: i64, places: [u64; 2], base: Base| {
        let mut dict = StateDict::new();
        for (half, start) in places.into_iter().enumerate() {
            let info = TensorInfo { name: "w".into(), dtype: Dtype::U8, shape: vec![5000] };
            let region = Region { shape: vec![10_000], offsets: vec![start] };
            dict.region(info, region, Box::new(noise(half as u64, 5000)));
        }
        let tree = ringstow::Value::Dict(vec![("w".into(), ringstow::Value::Tensor("w".into()))]);
        dict.set_tree(tree.to_json().unwrap()).base(base);
        run.save_dict(&dict, &run.at(step)).unwrap()
    };
    save(1, [0, 5000], Base::none());
    let same = save(2, [0, 5000], Base::at(run.at(1)));
    assert_eq!((same.linked_bytes, same.files), (same.file_bytes, 2));
    let swapped = save(3, [5000, 0], Base::at(run.at(2)));
    assert_eq!((swapped.linked_bytes, swapped.unchanged_bytes), (0, 0));
    let loaded = load_all(&run.runtime, &run.at(3)).unwrap();
    assert_eq!(loaded.tensor("w").unwrap().data(), [noise(1, 5000), noise(0, 5000)].concat());
}
