//! The engine's `FStageHierarchicalId`: `{stage, act, prop}`. Act 0 names a prop, prop 0 names an act.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Key {
    pub stage: i32,
    pub act: i32,
    pub prop: i32,
}

impl Key {
    pub fn of_prop(stage: i32, prop: i32) -> Self {
        Self { stage, act: 0, prop }
    }

    pub fn of_act(stage: i32, act: i32) -> Self {
        Self { stage, act, prop: 0 }
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{{{}, {}, {}}}", self.stage, self.act, self.prop)
    }
}

/// What can't be a key.
#[derive(Debug, thiserror::Error)]
#[error("{0:?} is no key such as {{101, 0, 1}} for a prop or {{101, 2, 0}} for an act")]
pub struct NoKey(String);

impl FromStr for Key {
    type Err = NoKey;

    /// Each key has one spelling, so that one thing can't be named twice.
    fn from_str(text: &str) -> Result<Self, NoKey> {
        let read = || {
            let mut numbers = text.strip_prefix('{')?.strip_suffix('}')?.split(", ").map(|number| number.parse().ok());
            let key = Self { stage: numbers.next()??, act: numbers.next()??, prop: numbers.next()?? };
            let names_one_thing = (key.act == 0) != (key.prop == 0);
            let is_in_bounds = key.stage > 0 && key.act >= 0 && key.prop >= 0;
            (names_one_thing && is_in_bounds && key.to_string() == text).then_some(key)
        };
        read().ok_or_else(|| NoKey(text.to_owned()))
    }
}

impl Serialize for Key {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Key {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_names_a_prop_or_an_act_in_one_spelling() {
        assert_eq!("{101, 0, 1}".parse::<Key>().unwrap(), Key::of_prop(101, 1));
        assert_eq!("{101, 2, 0}".parse::<Key>().unwrap(), Key::of_act(101, 2));
        assert_eq!(Key::of_prop(i32::MAX, 7).to_string(), "{2147483647, 0, 7}");
        for bad in [
            "",
            "{}",
            "101, 0, 1",
            "{101, 0}",
            "{101, 0, 1, 2}",
            "{101,0,1}",
            "{101, 0, 01}",
            "{101, 0, +1}",
            "{0, 0, 1}",
            "{101, 0, 0}",
            "{101, 1, 1}",
            "{101, 0, -1}",
            "{-1, 0, 1}",
            "{101, 0, 2147483648}",
            "{101, 0, x}",
            " {101, 0, 1}",
        ] {
            assert!(bad.parse::<Key>().is_err(), "{bad:?}");
        }
    }
}
