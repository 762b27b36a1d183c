//! The library's [`Config`], as flags.

use crate::config::{Config, EngineChoice, Switch};
use crate::error::Result;
use bytesize::ByteSize;
use clap::Args;
use clap::builder::{PossibleValuesParser, TypedValueParser};

/// How bytes are moved. The defaults are right for most machines.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "How bytes are moved")]
pub struct ConfigFlags {
    /// Staging memory (4M and 4MiB are 2^22 bytes, 4MB is 4·10^6) [default: 256M]
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pool_bytes: Option<u64>,

    /// One staging buffer, which is also one transfer; a multiple of 4096 [default: 4M]
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    block_bytes: Option<u64>,

    /// Transfers in flight at once [default: 8]
    #[arg(long, value_name = "N")]
    queue_depth: Option<u32>,

    /// Threads that copy and checksum; 0: one a core, at most four [default: 0]
    #[arg(long, value_name = "N")]
    fillers: Option<u32>,

    /// Who moves the bytes: auto, uring, portable or, in builds that have it, tokio-uring [default: auto]
    #[arg(long, value_name = "ENGINE", hide_possible_values = true, value_parser = engine())]
    engine: Option<EngineChoice>,

    /// O_DIRECT, past the page cache: auto, on or off [default: auto]
    #[arg(long, value_name = "WHEN", hide_possible_values = true, value_parser = switch())]
    direct: Option<Switch>,

    /// Staging memory registered with io_uring: auto, on or off [default: auto]
    #[arg(long, value_name = "WHEN", hide_possible_values = true, value_parser = switch())]
    fixed: Option<Switch>,
}

impl ConfigFlags {
    /// The configuration, checked.
    ///
    /// # Errors
    /// What [`Config::validate`] gives.
    pub fn config(&self) -> Result<Config> {
        let default = Config::default();
        let config = Config {
            pool_bytes: self.pool_bytes.unwrap_or(default.pool_bytes),
            block_bytes: self.block_bytes.unwrap_or(default.block_bytes),
            queue_depth: self.queue_depth.unwrap_or(default.queue_depth),
            fillers: self.fillers.unwrap_or(default.fillers),
            engine: self.engine.unwrap_or(default.engine),
            direct: self.direct.unwrap_or(default.direct),
            fixed: self.fixed.unwrap_or(default.fixed),
            shard_bytes: default.shard_bytes,
        };
        config.validate()?;
        Ok(config)
    }
}

fn engine() -> impl TypedValueParser<Value = EngineChoice> {
    PossibleValuesParser::new(["auto", "uring", "portable", "tokio-uring"]).map(|name| {
        match name.as_str() {
            "uring" => EngineChoice::Uring,
            "portable" => EngineChoice::Portable,
            "tokio-uring" => EngineChoice::TokioUring,
            _ => EngineChoice::Auto,
        }
    })
}

fn switch() -> impl TypedValueParser<Value = Switch> {
    PossibleValuesParser::new(["auto", "on", "off"]).map(|name| match name.as_str() {
        "on" => Switch::On,
        "off" => Switch::Off,
        _ => Switch::Auto,
    })
}

/// A size as `dd` and `fio` read it: a bare letter is a power of two.
fn parse_size(text: &str) -> std::result::Result<u64, String> {
    let bare = text.ends_with(['k', 'K', 'm', 'M', 'g', 'G', 't', 'T']);
    let full = if bare { format!("{text}iB") } else { text.to_owned() };
    let size: ByteSize =
        full.parse().map_err(|_| "a size is a number and a unit: 4M, 256MiB, 1GB".to_owned())?;
    Ok(size.as_u64())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bare_letter_is_a_power_of_two() {
        assert_eq!(parse_size("4M"), Ok(4 << 20));
        assert_eq!(parse_size("4m"), Ok(4 << 20));
        assert_eq!(parse_size("256MiB"), Ok(256 << 20));
        assert_eq!(parse_size("1.5 GiB"), Ok(3 << 29));
        assert_eq!(parse_size("4MB"), Ok(4_000_000));
        assert_eq!(parse_size("65536"), Ok(65536));
        for bad in ["", "M", "-4M", "4X", "4 apples"] {
            assert!(parse_size(bad).is_err(), "{bad:?}");
        }
    }
}
