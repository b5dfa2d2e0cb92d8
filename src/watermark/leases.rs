//! Leases: small numbers, each held by one owner at a time and fenced by time.
//!
//! A holder stamps what he does with the number and the time. None stamps a moment at or after his lease's end, none one
//! before the lease's beginning, which is the end of the lease before. So two clocks that disagree cost waiting, but the
//! same number is never used twice for the same moment.
//!
//! Numbers that nobody ever held go first, then the one whose lease ended longest ago. Moments are milliseconds since 1970.

use serde::{Deserialize, Serialize};

use super::State;
use crate::error::{Code, Error, Result};

/// What one value of the bucket can hold: a lease has up to 200 bytes, and a message a megabyte.
const MOST: usize = 4096;

/// All leases of one set. The position is the number.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Leases {
    leases: Vec<Lease>,
    /// Leases given so far. Every new one gets the next epoch, so no two have the same.
    epochs: u64,
}

impl State for Leases {}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Lease {
    /// None once it was given back.
    owner: Option<String>,
    epoch: u64,
    begins: i64,
    ends: i64,
}

/// A lease as its holder knows it: moments from `begins` on and before `ends` are his.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Held {
    pub number: u32,
    pub owner: String,
    pub epoch: u64,
    pub begins: i64,
    pub ends: i64,
}

/// For how long, and how many there are.
#[derive(Debug, Clone, Copy)]
pub struct Terms {
    pub now: i64,
    pub ttl: i64,
    /// Numbers from 0 up to this one, which is not among them.
    pub numbers: u64,
}

impl Terms {
    /// How many numbers can be lent.
    fn bounded(self) -> usize {
        usize::try_from(self.numbers).unwrap_or(MOST).min(MOST)
    }
}

impl Leases {
    /// A lease for the owner. One who has a lease already gets it again: an owner is one process, and asks twice when
    /// the first answer was lost. It then begins now, in case it is one that was started anew.
    pub fn take(&mut self, owner: &str, terms: Terms) -> Result<Held> {
        if let Some(number) = self.leases.iter().position(|lease| lease.owner.as_deref() == Some(owner)) {
            let lease = &mut self.leases[number];
            lease.begins = lease.begins.max(terms.now);
            lease.ends = lease.ends.max(terms.now + terms.ttl);
            return Ok(self.held(number));
        }
        let numbers = terms.bounded();
        let number = if self.leases.len() < numbers {
            self.leases.push(Lease { owner: None, epoch: 0, begins: 0, ends: 0 });
            self.leases.len() - 1
        } else {
            let ended = self.leases.iter().enumerate().take(numbers).min_by_key(|(_, lease)| lease.ends);
            match ended {
                Some((number, lease)) if lease.ends <= terms.now => number,
                _ => return Err(all_taken(numbers)),
            }
        };
        self.epochs += 1;
        let begins = self.leases[number].ends;
        let ends = begins.max(terms.now) + terms.ttl;
        self.leases[number] = Lease { owner: Some(owner.to_owned()), epoch: self.epochs, begins, ends };
        Ok(self.held(number))
    }

    /// Keeps a lease for longer. One that somebody else has by now is lost, whatever its holder believes.
    pub fn renew(&mut self, owner: &str, epoch: u64, terms: Terms) -> Result<Held> {
        let number = self.find(owner, epoch)?;
        let lease = &mut self.leases[number];
        lease.ends = lease.ends.max(terms.now + terms.ttl);
        Ok(self.held(number))
    }

    /// Gives a lease back. With the last moment that was used, the next holder may begin right after it; without, only
    /// when the lease would have ended.
    pub fn release(&mut self, owner: &str, epoch: u64, last: Option<i64>) -> Result<()> {
        let number = self.find(owner, epoch)?;
        let lease = &mut self.leases[number];
        if let Some(last) = last {
            if last >= lease.ends {
                let problem = format!("must lie before the end of the lease, {}", lease.ends);
                return Err(Error::field("last_timestamp", problem));
            }
            lease.ends = (last + 1).max(lease.begins);
        }
        lease.owner = None;
        Ok(())
    }

    /// After the leases were put back to the state of a moment: nobody knows who has taken which number since. Those that were
    /// held then, and as many more as may have been taken, in the order in which they are lent, are lent to nobody until the
    /// longest lease is over. No lease of before can be renewed.
    pub fn hold(&mut self, since: i64, more: u32, terms: Terms) {
        let mut held: Vec<usize> = (0..self.leases.len()).filter(|number| self.is_held(*number, since)).collect();
        let mut free: Vec<usize> = (0..self.leases.len()).filter(|number| !self.is_held(*number, since)).collect();
        free.sort_by_key(|number| self.leases[*number].ends);
        let unused = self.leases.len()..terms.bounded().max(self.leases.len());
        let next: Vec<usize> = unused.chain(free).take(more as usize).collect();
        let known = next.iter().map(|number| number + 1).max().unwrap_or_default().max(self.leases.len());
        self.leases.resize(known, Lease { owner: None, epoch: 0, begins: 0, ends: 0 });
        held.extend(next);
        for number in held {
            self.leases[number].ends = self.leases[number].ends.max(terms.now + terms.ttl);
        }
        self.leases.iter_mut().for_each(|lease| lease.owner = None);
        // Epochs of before are not given again either.
        self.epochs = (self.epochs + 1).next_multiple_of(1 << 32);
    }

    /// Whether somebody may have used it at a moment.
    fn is_held(&self, number: usize, at: i64) -> bool {
        self.leases[number].ends > at
    }

    /// Leases that somebody holds.
    pub fn active(&self, now: i64) -> usize {
        self.leases.iter().filter(|lease| lease.owner.is_some() && lease.ends > now).count()
    }

    /// Whether any was ever given.
    pub fn is_used(&self) -> bool {
        self.epochs > 0
    }

    fn held(&self, number: usize) -> Held {
        let Lease { owner, epoch, begins, ends } = self.leases[number].clone();
        Held { number: number as u32, owner: owner.unwrap_or_default(), epoch, begins, ends }
    }

    fn find(&self, owner: &str, epoch: u64) -> Result<usize> {
        let is_it = |lease: &Lease| lease.owner.as_deref() == Some(owner) && lease.epoch == epoch;
        self.leases.iter().position(is_it).ok_or_else(|| {
            Error::new(
                Code::Conflict,
                format!("the lease {epoch} of {owner} is lost: it ended and may be another's by now"),
            )
        })
    }
}

fn all_taken(numbers: usize) -> Error {
    Error::new(Code::Exhausted, format!("all {numbers} worker ids are leased"))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const TERMS: Terms = Terms { now: 1000, ttl: 100, numbers: 2 };

    fn at(now: i64) -> Terms {
        Terms { now, ..TERMS }
    }

    #[test]
    fn unused_numbers_go_first_then_the_one_that_ended_longest_ago() {
        let mut leases = Leases::default();
        assert_eq!(leases.take("a", at(1000)).unwrap().number, 0);
        assert_eq!(leases.take("b", at(1010)).unwrap().number, 1);
        let refused = leases.take("c", at(1099)).unwrap_err();
        assert_eq!(refused.code, Code::Exhausted);
        leases.renew("a", 1, at(1050)).unwrap();
        let c = leases.take("c", at(1120)).unwrap();
        assert_eq!((c.number, c.epoch, c.begins, c.ends), (1, 3, 1110, 1220), "b's lease ended first");
        assert_eq!(leases.active(1120), 2);
        assert_eq!(leases.renew("b", 2, at(1120)).unwrap_err().code, Code::Conflict, "b has lost it");
    }

    #[test]
    fn a_lease_that_ended_but_went_to_nobody_can_still_be_renewed() {
        let mut leases = Leases::default();
        leases.take("a", at(1000)).unwrap();
        let renewed = leases.renew("a", 1, at(5000)).unwrap();
        assert_eq!((renewed.begins, renewed.ends), (0, 5100));
    }

    #[test]
    fn the_same_owner_gets_the_same_lease() {
        let mut leases = Leases::default();
        let first = leases.take("a", at(1000)).unwrap();
        let again = leases.take("a", at(1040)).unwrap();
        assert_eq!((again.number, again.epoch), (first.number, first.epoch));
        assert_eq!((again.begins, again.ends), (1040, 1140));
    }

    #[test]
    fn what_is_given_back_begins_after_the_last_moment_used() {
        let mut leases = Leases::default();
        let terms = Terms { numbers: 1, ..TERMS };
        leases.take("a", terms).unwrap();
        assert!(leases.release("a", 1, Some(1100)).unwrap_err().message.contains("last_timestamp"));
        leases.release("a", 1, Some(1020)).unwrap();
        assert_eq!(leases.active(1000), 0);
        assert_eq!(leases.release("a", 1, None).unwrap_err().code, Code::Conflict);
        assert_eq!(leases.take("b", terms).unwrap_err().code, Code::Exhausted, "by this clock 1020 has not come yet");
        assert_eq!(leases.take("b", Terms { now: 1021, ..terms }).unwrap().begins, 1021);
        leases.release("b", 2, None).unwrap();
        assert_eq!(leases.take("c", Terms { now: 1130, ..terms }).unwrap().begins, 1121);
    }

    #[test]
    fn what_may_be_held_after_a_restore_is_lent_to_nobody() {
        let terms = |now| Terms { now, ttl: 100, numbers: 8 };
        let mut leases = Leases::default();
        for owner in ["a", "b", "c", "d"] {
            leases.take(owner, terms(0)).unwrap();
        }
        leases.release("b", 2, Some(10)).unwrap();
        leases.release("c", 3, Some(20)).unwrap();
        // At 50, a and d are held. Since then up to three may have been taken: the next in order are 4, 5, 6.
        let mut restored = leases.clone();
        restored.hold(50, 3, Terms { ttl: 1000, ..terms(200) });
        assert_eq!(restored.take("e", terms(200)).unwrap().number, 7, "the first that nobody can have");
        assert_eq!(restored.take("f", terms(200)).unwrap().number, 1, "then those that were free all the time");
        assert_eq!(restored.take("g", terms(200)).unwrap().number, 2);
        assert!(restored.take("h", terms(200)).is_err(), "everything else may be held");
        assert!(restored.renew("a", 1, terms(200)).is_err(), "it may be another's by now");
        let late = restored.take("h", terms(1200)).unwrap();
        assert!(late.begins >= 1200 || late.number == 1 || late.number == 2 || late.number == 7, "{late:?}");
        // More than there are.
        leases.hold(50, 100, Terms { ttl: 1000, ..terms(200) });
        assert!(leases.take("e", terms(200)).is_err());
        assert!(leases.take("e", terms(1201)).is_ok());
    }

    proptest! {
        /// Whatever is asked in whatever order, by clocks that disagree: the times of one number's leases never overlap.
        #[test]
        fn no_number_is_held_twice_for_the_same_moment(
            calls in prop::collection::vec((0_u8..3, 0_usize..5, 0_i64..60, -20_i64..20), 1..200),
        ) {
            let mut leases = Leases::default();
            let mut now = 1000;
            // What each owner knows: its lease, and the last moment that it used.
            let mut holders: Vec<Option<(Held, i64)>> = vec![None; 5];
            let mut used: std::collections::BTreeMap<u32, Vec<(i64, u64)>> = Default::default();
            for (call, owner, pause, skew) in calls {
                now += pause;
                let terms = Terms { now: now + skew, ttl: 50, numbers: 3 };
                let name = format!("owner{owner}");
                match (call, holders[owner].clone()) {
                    (0, None) => holders[owner] = leases.take(&name, terms).ok().map(|held| { let before = held.begins - 1; (held, before) }),
                    (1, Some((held, last))) => match leases.renew(&name, held.epoch, terms) {
                        Ok(renewed) => holders[owner] = Some((renewed, last)),
                        Err(_) => holders[owner] = None,
                    },
                    (2, Some((held, last))) => {
                        let _ = leases.release(&name, held.epoch, Some(last));
                        holders[owner] = None;
                    }
                    _ => {}
                }
                // Everyone who may uses the moment that its own clock shows.
                for (index, holder) in holders.iter_mut().enumerate() {
                    let Some((held, last)) = holder else { continue };
                    let moment = now + (index as i64 - 2) * 7;
                    if moment > *last && moment >= held.begins && moment < held.ends {
                        *last = moment;
                        used.entry(held.number).or_default().push((moment, held.epoch));
                    }
                }
            }
            for (number, mut moments) in used {
                moments.sort();
                for pair in moments.windows(2) {
                    prop_assert!(pair[0].0 != pair[1].0, "{number} was used twice at {}", pair[0].0);
                }
            }
        }
    }
}
