//! The order in which lanes, disks or directories take turns.

/// The items such that the lanes they are in take turns, so that no disk waits for the others to end: the first item of
/// each lane, then the second of each. Those of one turn stay in order.
pub fn in_turns<T>(items: Vec<T>, lane_of: impl Fn(&T) -> usize) -> Vec<T> {
    let mut taken: Vec<usize> = Vec::new();
    let with_turn = |item| {
        let lane = lane_of(&item);
        taken.resize(taken.len().max(lane + 1), 0);
        taken[lane] += 1;
        (taken[lane], item)
    };
    let mut items: Vec<(usize, T)> = items.into_iter().map(with_turn).collect();
    // A stable sort; one lane is in order already.
    items.sort_by_key(|(turn, _)| *turn);
    items.into_iter().map(|(_, item)| item).collect()
}

#[cfg(test)]
mod tests {
    use super::in_turns;

    #[test]
    fn lanes_take_turns_and_the_longest_ends_alone() {
        let items = vec![(0, 'a'), (0, 'b'), (0, 'c'), (2, 'x'), (1, 'p'), (2, 'y')];
        let order: String =
            in_turns(items, |(lane, _)| *lane).into_iter().map(|(_, c)| c).collect();
        assert_eq!(order, "axpbyc");
    }
}
