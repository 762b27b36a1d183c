//! What was measured, as a person reads it.

use super::super::table::{Align, list, table};
use super::super::text;
use super::gpu::GpuFigures;
use super::{Figures, Measured, OfHost, Spread, Way};
use crate::config::Config;

pub(super) fn text(measured: &Measured) -> String {
    let Config { block_bytes, queue_depth, pool_bytes, .. } = measured.config;
    let mut text = format!(
        "{}: {}, median of {} (min–max)\nblocks of {}, queue depth {queue_depth}, pool {}\n\n",
        text::path(&measured.dir),
        text::size(measured.bytes),
        text::count(measured.rounds.into(), "round"),
        text::binary_size(block_bytes),
        text::binary_size(pool_bytes)
    );
    text.push_str(&match &measured.gpu {
        Some(gpu) if measured.ways.is_empty() => copies(gpu),
        Some(gpu) => format!("{}\n\n{}", copies(gpu), beside_host(&measured.ways)),
        None => rungs(&measured.ways),
    });
    let refused = measured.ways.iter().flat_map(|way| {
        let said = way.refused.iter().chain(&way.notes);
        said.map(|why| [text::printable(&way.name), text::printable(why)])
    });
    let refused: Vec<[String; 2]> = refused.collect();
    if !refused.is_empty() {
        text.push_str("\n\n");
        text.push_str(&list(refused));
    }
    if cfg!(debug_assertions) {
        text.push_str("\n\nThis is a debug build; one with --release is many times faster.");
    }
    text
}

fn rungs(ways: &[Way]) -> String {
    use Align::{Left, Right};
    let columns = [
        ("", Left),
        ("SAVE GB/s", Right),
        ("CPU s/GB", Right),
        ("LOAD GB/s", Right),
        ("CPU s/GB", Right),
    ];
    let cpu = |figures: &Option<Figures>| {
        figures.as_ref().map_or_else(dash, |f| format!("{:.2}", f.cpu_s_per_gb.median))
    };
    let row = |way: &Way| {
        let name = way.name.clone();
        [name, rate(way, &way.save), cpu(&way.save), rate(way, &way.load), cpu(&way.load)]
    };
    table(columns, ways.iter().map(row))
}

/// With the rate of the GPU's own copies, and the ratio to the line above.
fn beside_host(ways: &[Way]) -> String {
    let save = ways.iter().map(|way| beside_host_row(way, &way.save, |of| of.save));
    let load = ways.iter().map(|way| beside_host_row(way, &way.load, |of| of.load));
    format!("{}\n\n{}", beside_host_table("SAVE", save), beside_host_table("LOAD", load))
}

fn beside_host_table(what: &str, rows: impl Iterator<Item = [String; 4]>) -> String {
    use Align::{Left, Right};
    let columns = [(what, Left), ("GB/s", Right), ("GPU's copies", Right), ("of host's", Right)];
    table(columns, rows)
}

fn beside_host_row(
    way: &Way,
    figures: &Option<Figures>,
    ratio: impl Fn(&OfHost) -> Spread,
) -> [String; 4] {
    let copies = figures.as_ref().and_then(|figures| figures.copies_gb_per_s);
    [
        way.name.clone(),
        rate(way, figures),
        copies.map_or_else(dash, |rate| format!("{:.1}", rate.median)),
        way.of_host.as_ref().map_or_else(dash, |of_host| ratio(of_host).to_string()),
    ]
}

#[cfg(feature = "cuda")]
fn copies(gpu: &GpuFigures) -> String {
    let rates = gpu.copies_gb_per_s;
    let pinned = |rate: Option<f64>| rate.map_or("refused".into(), |rate| format!("{rate:.1}"));
    let rows = [
        ["GB/s".into(), "pinned".into(), "pageable".into()],
        [
            "to host, one large copy".into(),
            pinned(rates.to_host_pinned),
            format!("{:.1}", rates.to_host_pageable),
        ],
        [
            "from host, one large copy".into(),
            pinned(rates.to_device_pinned),
            format!("{:.1}", rates.to_device_pageable),
        ],
        ["a save to nowhere".into(), gpu.to_nowhere_gb_per_s.to_string(), String::new()],
        [
            "  of one large pinned copy".into(),
            gpu.to_nowhere_of_large_copy.map_or_else(dash, |ratio| ratio.to_string()),
            String::new(),
        ],
    ];
    format!("GPU {}: {}\n{}", gpu.ordinal, text::printable(&gpu.name), list(rows))
}

#[cfg(not(feature = "cuda"))]
fn copies(gpu: &GpuFigures) -> String {
    match *gpu {}
}

fn rate(way: &Way, figures: &Option<Figures>) -> String {
    match (figures, &way.refused) {
        (Some(figures), _) => figures.gb_per_s.to_string(),
        (None, Some(_)) => "refused".into(),
        (None, None) => dash(),
    }
}

fn dash() -> String {
    "-".to_owned()
}

impl std::fmt::Display for Spread {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { median, min, max } = self;
        write!(f, "{median:.2} ({min:.2}–{max:.2})")
    }
}
