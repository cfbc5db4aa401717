//! A page that shows the guests live: one document without references, and a stream of events for it.
//!
//! | module | contents |
//! |---|---|
//! | `guests` | the guests as the page shows them |
//! | `history` | their last minutes, and the events with what has changed |
//! | `feed` | the open pages, and the collection for them |

pub(crate) mod feed;
mod guests;
pub(crate) mod history;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use ring::digest::{SHA256, digest};

const STYLE: &str = include_str!("../../page/page.css");
const SCRIPT: &str = include_str!("../../page/page.js");
/// The whole document.
pub(crate) const DOCUMENT: &str = concat!(
    include_str!("../../page/head.html"),
    "<style>",
    include_str!("../../page/page.css"),
    "</style>\n",
    include_str!("../../page/body.html"),
    "<script type=\"module\">",
    include_str!("../../page/page.js"),
    "</script>\n</html>\n"
);

/// Returns the Content-Security-Policy of the document: only its own style and script, and events of this server. The
/// script cannot make markup from text.
pub(crate) fn security_policy() -> String {
    let hash = |text: &str| format!("'sha256-{}'", STANDARD.encode(digest(&SHA256, text.as_bytes())));
    format!(
        "default-src 'none'; script-src {}; style-src {}; connect-src 'self'; img-src data:; base-uri 'none'; \
         form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'",
        hash(SCRIPT),
        hash(STYLE)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_document_refers_to_nothing_and_makes_no_markup_from_text() {
        let lower = DOCUMENT.to_lowercase();
        for word in [
            "innerhtml",
            "outerhtml",
            "insertadjacenthtml",
            "document.write",
            "eval(",
            " style=",
            " onclick",
            "@import",
        ] {
            assert!(!lower.contains(word), "{word}");
        }
        assert!(!STYLE.contains("</") && !SCRIPT.contains("</"), "they would end their element");
        let links: Vec<_> = DOCUMENT.split("://").skip(1).collect();
        assert!(links.iter().all(|link| link.starts_with("www.w3.org/2000/svg")), "{links:?}");
    }
}
