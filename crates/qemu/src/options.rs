//! The values of QEMU's command line options: `type,key=value,...` and JSON.
//!
//! Values are parsed so that they can be read and changed, and written so that QEMU reads the same. In `key=value`
//! form a comma in a value is doubled. The first item may have no key (`-device VGA`); the implied key is then added
//! when the value is written. A later item without `=` is a switch (`server`, `nowait`) and is kept as it is.

use serde_json::{Map, Value};
use std::fmt;

/// The value of one option.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Options {
    /// `key=value,...`, in order. An item without a value is a switch.
    Pairs(Vec<(String, Option<String>)>),
    Json(Map<String, Value>),
}

/// Why QEMU would reject a value.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{text}` is no value of a QEMU option: {why}")]
pub struct OptionsError {
    pub text: String,
    pub why: String,
}

impl Options {
    /// Parses a value. `implied_key` is the key of a first item that has none; empty if the option has no implied key.
    ///
    /// # Errors
    /// The value begins as JSON but is not a JSON object, or an item has no key.
    pub fn parse(text: &str, implied_key: &str) -> Result<Self, OptionsError> {
        let failed = |why: String| OptionsError { text: text.into(), why };
        if text.starts_with('{') {
            return serde_json::from_str(text).map(Self::Json).map_err(|e| failed(e.to_string()));
        }
        let mut pairs: Vec<(String, Option<String>)> = Vec::new();
        let mut unread = text;
        while !unread.is_empty() {
            let key_length = unread.find(['=', ',']).unwrap_or(unread.len());
            let (key, after_key) = unread.split_at(key_length);
            if let Some(after_equals) = after_key.strip_prefix('=') {
                if key.is_empty() {
                    return Err(failed(format!("nothing before `={after_equals}`")));
                }
                let (value, after_value) = split_value(after_equals);
                pairs.push((key.into(), Some(value)));
                unread = after_value;
            } else if pairs.is_empty() && !implied_key.is_empty() {
                let (value, after_value) = split_value(unread);
                pairs.push((implied_key.into(), Some(value)));
                unread = after_value;
            } else if key.is_empty() {
                return Err(failed("an item is empty".into()));
            } else {
                pairs.push((key.into(), None));
                unread = after_key.strip_prefix(',').unwrap_or(after_key);
            }
        }
        Ok(Self::Pairs(pairs))
    }

    /// Returns the text of a key. If the key occurs several times, the last one counts, as in QEMU. A switch is `on`.
    /// In JSON, lists and objects have no text.
    pub fn get(&self, key: &str) -> Option<String> {
        match self {
            Self::Pairs(pairs) => {
                let (_, value) = pairs.iter().rev().find(|(name, _)| name == key)?;
                Some(value.clone().unwrap_or_else(|| "on".into()))
            }
            Self::Json(map) => match map.get(key)? {
                Value::String(text) => Some(text.clone()),
                Value::Bool(on) => Some(if *on { "on" } else { "off" }.into()),
                Value::Number(number) => Some(number.to_string()),
                Value::Null | Value::Array(_) | Value::Object(_) => None,
            },
        }
    }

    /// Sets the text of a key, at its present position or at the end.
    pub fn set(&mut self, key: &str, text: &str) {
        match self {
            Self::Pairs(pairs) => {
                let pair = (key.to_owned(), Some(text.to_owned()));
                let position = pairs.iter().position(|(name, _)| name == key).unwrap_or(pairs.len());
                // The key may occur several times.
                pairs.retain(|(name, _)| name != key);
                pairs.insert(position, pair);
            }
            Self::Json(map) => drop(map.insert(key.into(), text.into())),
        }
    }

    /// Adds a text of a key that may occur several times. In JSON, it replaces the present one.
    pub fn add(&mut self, key: &str, text: &str) {
        match self {
            Self::Pairs(pairs) => pairs.push((key.into(), Some(text.into()))),
            Self::Json(_) => self.set(key, text),
        }
    }

    /// Sets a key to `on` or `off`, like [`Options::set`]. In JSON, QEMU accepts only a Boolean there.
    pub fn set_switch(&mut self, key: &str, on: bool) {
        match self {
            Self::Pairs(_) => self.set(key, if on { "on" } else { "off" }),
            Self::Json(map) => drop(map.insert(key.into(), on.into())),
        }
    }

    /// Sets a key to JSON's null, which `key=value` form writes as an empty text.
    pub fn set_null(&mut self, key: &str) {
        match self {
            Self::Pairs(_) => self.set(key, ""),
            Self::Json(map) => drop(map.insert(key.into(), Value::Null)),
        }
    }

    /// Removes each key for which `is_removed` is true.
    pub fn remove(&mut self, is_removed: impl Fn(&str) -> bool) {
        match self {
            Self::Pairs(pairs) => pairs.retain(|(name, _)| !is_removed(name)),
            Self::Json(map) => map.retain(|name, _| !is_removed(name)),
        }
    }

    /// Returns all keys, in order.
    pub fn keys(&self) -> Vec<&str> {
        match self {
            Self::Pairs(pairs) => pairs.iter().map(|(name, _)| name.as_str()).collect(),
            Self::Json(map) => map.keys().map(String::as_str).collect(),
        }
    }
}

/// Splits off a value up to the comma that ends it. Returns the value and the text after the comma.
fn split_value(text: &str) -> (String, &str) {
    let mut value = String::new();
    let mut unread = text;
    loop {
        let Some((part, after_comma)) = unread.split_once(',') else { return (value + unread, "") };
        value += part;
        match after_comma.strip_prefix(',') {
            Some(after_double_comma) => {
                value.push(',');
                unread = after_double_comma;
            }
            None => return (value, after_comma),
        }
    }
}

impl fmt::Display for Options {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Json(map) => write!(f, "{}", serde_json::to_string(map).map_err(|_| fmt::Error)?),
            Self::Pairs(pairs) => {
                for (index, (key, value)) in pairs.iter().enumerate() {
                    let comma = if index == 0 { "" } else { "," };
                    match value {
                        Some(value) => write!(f, "{comma}{key}={}", value.replace(',', ",,"))?,
                        None => write!(f, "{comma}{key}")?,
                    }
                }
                Ok(())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn pairs(text: &str, implied: &str) -> Options {
        Options::parse(text, implied).unwrap()
    }

    #[test]
    fn commas_implied_keys_and_switches() {
        let options = pairs("socket,id=a,path=/x,,y,,,,z,server,wait=off", "backend");
        assert_eq!(options.get("backend").unwrap(), "socket");
        assert_eq!(options.get("path").unwrap(), "/x,y,,z");
        assert_eq!(options.get("server").unwrap(), "on");
        assert_eq!(options.to_string(), "backend=socket,id=a,path=/x,,y,,,,z,server,wait=off");
        assert_eq!(pairs("a,,b,c=d", "file").get("file").unwrap(), "a,b");
        assert_eq!(pairs("", "file").keys(), Vec::<&str>::new());
        assert_eq!(pairs("x=", "file").get("x").unwrap(), "");
        assert_eq!(pairs("x=1,x=2", "").get("x").unwrap(), "2");
    }

    #[test]
    fn keys_are_set_in_their_place() {
        let mut options = pairs("q35,accel=tcg,smm=off,accel=kvm", "type");
        options.set("accel", "a,b");
        options.set("type", "pc-q35-7.2");
        options.set("new", "1");
        assert_eq!(options.to_string(), "type=pc-q35-7.2,accel=a,,b,smm=off,new=1");
        options.remove(|key| key == "accel" || key == "new");
        assert_eq!(options.to_string(), "type=pc-q35-7.2,smm=off");
        let mut json = pairs(r#"{"driver":"vmgenid","guid":"auto","bootindex":1}"#, "driver");
        json.set("guid", "x");
        assert_eq!((json.get("guid").unwrap(), json.get("bootindex").unwrap()), ("x".into(), "1".into()));
        json.remove(|key| key == "bootindex");
        json.set_switch("on", true);
        options.set_switch("smm", false);
        assert_eq!(json.to_string(), r#"{"driver":"vmgenid","guid":"x","on":true}"#);
        json.set_null("guid");
        options.set_null("smm");
        assert_eq!(json.to_string(), r#"{"driver":"vmgenid","guid":null,"on":true}"#);
        assert_eq!(options.to_string(), "type=pc-q35-7.2,smm=");
    }

    #[test]
    fn a_value_that_qemu_would_reject_is_named() {
        for text in ["{\"a\":", "{}x", "a=b,=c", "=c"] {
            let e = Options::parse(text, "").unwrap_err().to_string();
            assert!(e.contains(text), "{e}");
        }
    }

    proptest! {
        #[test]
        fn what_is_written_is_read(
            first in "[^={][^=]{0,12}",
            more in proptest::collection::vec(("[a-z][a-z0-9.-]{0,8}", proptest::option::of(".{0,12}")), 0..6),
        ) {
            let mut pairs = vec![("implied".to_owned(), Some(first))];
            pairs.extend(more);
            let options = Options::Pairs(pairs);
            prop_assert_eq!(Options::parse(&options.to_string(), "other").unwrap(), options.clone());
            prop_assert_eq!(Options::parse(&options.to_string(), "").unwrap(), options);
        }

        #[test]
        fn an_implied_first_item_is_read_as_if_it_had_its_key(first in "[^={,][^=,]{0,12}", rest in "(,k=[a-z]{0,5}){0,3}") {
            let (short, long) = (format!("{first}{rest}"), format!("implied={first}{rest}"));
            prop_assert_eq!(Options::parse(&short, "implied").unwrap(), Options::parse(&long, "implied").unwrap());
        }

        #[test]
        fn no_text_makes_it_panic(text in ".{0,60}", implied in "[a-z]{0,3}") {
            if let Ok(options) = Options::parse(&text, &implied) {
                prop_assert_eq!(Options::parse(&options.to_string(), "").unwrap(), options);
            }
        }

        #[test]
        fn json_stays_what_it_is(text in "[a-z,={}\"\\\\]{0,20}", number: i64, on: bool) {
            let value = serde_json::json!({"driver": text, "number": number, "on": on, "file": {"a": [text]}});
            let options = Options::parse(&value.to_string(), "driver").unwrap();
            prop_assert_eq!(options.get("driver"), Some(text));
            prop_assert_eq!(serde_json::from_str::<Value>(&options.to_string()).unwrap(), value);
        }
    }
}
