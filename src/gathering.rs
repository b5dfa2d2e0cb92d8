//! Gathering: whoever waits at the same time shares one write, and it may pay to wait a moment for more.
//!
//! Callers that ask again as soon as they are answered come in a crowd. Whoever goes at once, with the few that came during
//! the last write, lets the crowd wait for a write of its own: two in turns. Waiting until it is back makes one of them. That is
//! faster where a write takes longer than the way to the callers and back, and slower where it does not, because nothing is
//! written meanwhile. Disk, network and callers decide, so now and then the other way is tried for a while, and whichever
//! stored more in the same time is kept.

use std::time::Duration;

use tokio::{
    sync::mpsc,
    time::{Instant, timeout_at},
};

/// So many make a crowd. Fewer are not worth waiting for.
const CROWD: usize = 8;

/// Who is not back by then is not waited for, however long a write takes.
const LONGEST: Duration = Duration::from_millis(20);

/// A queue from which all who wait are taken together.
pub struct Gathering<T> {
    queue: mpsc::Receiver<T>,
    under_way: Option<Group>,
    last: Option<Write>,
    pace: Pace,
}

/// What was taken together, and when.
struct Group {
    size: usize,
    taken: Instant,
}

/// What became of a group.
#[derive(Clone, Copy)]
struct Write {
    size: usize,
    took: Duration,
    /// Who was about when it ended: they are answered now, or came meanwhile.
    about: usize,
}

impl<T> Gathering<T> {
    pub fn new(queue: mpsc::Receiver<T>) -> Self {
        Self { queue, under_way: None, last: None, pace: Pace::default() }
    }

    /// Takes who waits, at most so many, as soon as there is anybody. Those who were taken before are answered by now. None if
    /// nobody can come any more.
    pub async fn take(&mut self, into: &mut Vec<T>, most: usize) -> usize {
        if let Some(group) = self.under_way.take() {
            let about = (group.size + self.queue.len()).min(most);
            self.last = Some(Write { size: group.size, took: group.taken.elapsed(), about });
        }
        let free = Instant::now();
        let mut size = self.queue.recv_many(into, most).await;
        let first = Instant::now();
        if let Some(last) = self.last {
            if self.pace.waits && last.about >= CROWD {
                size += self.wait(last, into, size, most).await;
            }
            self.pace.add(last, first - free, first.elapsed());
        }
        self.under_way = Some(Group { size, taken: Instant::now() });
        size
    }

    /// Waits for those who are about, but for the last few of them.
    async fn wait(&mut self, last: Write, into: &mut Vec<T>, have: usize, most: usize) -> usize {
        let until = Instant::now() + last.took.min(LONGEST);
        let enough = last.about - last.about / 8;
        let mut more = 0;
        while have + more < enough {
            match timeout_at(until, self.queue.recv_many(into, most - have - more)).await {
                Ok(0) | Err(_) => break,
                Ok(came) => more += came,
            }
        }
        more
    }

    /// Lets nobody in any more. Who waits already is still taken.
    pub fn close(&mut self) {
        self.queue.close();
    }
}

/// Whether groups wait, and how fast it went.
struct Pace {
    waits: bool,
    /// Whether this is the other way, for one stretch.
    tries: bool,
    stretch: Stretch,
    /// Of the stretch before a try, in changes a second.
    rate: f64,
    /// Stretches until the next try.
    left: u32,
    /// Stretches between the last one and that: more each time that the other way was not better.
    patience: u32,
}

/// Groups one after the other, all in the same way.
#[derive(Default)]
struct Stretch {
    groups: u32,
    changes: usize,
    time: Duration,
}

impl Pace {
    const GROUPS: u32 = 64;
    const PATIENCE: u32 = 8;
    const MOST_PATIENCE: u32 = 256;
    /// Waiting must be better by this: it makes answers slower where it changes nothing else.
    const WORTH: f64 = 1.03;

    /// A group, how long nobody came after it, and how long was waited for more.
    fn add(&mut self, group: Write, idle: Duration, waited: Duration) {
        // Nobody was about. What pays shows under load.
        if idle > group.took * 8 {
            self.stretch = Stretch::default();
            return;
        }
        self.stretch.groups += 1;
        self.stretch.changes += group.size;
        self.stretch.time += group.took + idle + waited;
        if self.stretch.groups == Self::GROUPS {
            let stretch = std::mem::take(&mut self.stretch);
            self.judge(stretch.changes as f64 / stretch.time.as_secs_f64());
        }
    }

    fn judge(&mut self, rate: f64) {
        if !self.tries {
            self.rate = rate;
            self.left -= 1;
            if self.left == 0 {
                (self.waits, self.tries) = (!self.waits, true);
            }
            return;
        }
        let (waiting, going) = if self.waits { (rate, self.rate) } else { (self.rate, rate) };
        let waits = waiting > going * Self::WORTH;
        self.patience = if waits == self.waits { Self::PATIENCE } else { (self.patience * 2).min(Self::MOST_PATIENCE) };
        (self.waits, self.tries, self.left) = (waits, false, self.patience);
    }
}

impl Default for Pace {
    fn default() -> Self {
        let (waits, tries, stretch) = (false, false, Stretch::default());
        Self { waits, tries, stretch, rate: 0.0, left: 1, patience: Self::PATIENCE }
    }
}

#[cfg(test)]
mod tests {
    use tokio::{sync::oneshot, task::JoinSet, time::sleep};

    use super::*;

    type Asked = oneshot::Sender<()>;

    const MILLISECOND: Duration = Duration::from_millis(1);

    /// How many answers callers get within some seconds who ask again after a way of their own, from a store whose writes
    /// take as long as is said. In tokio's time, which jumps.
    async fn answered(callers: u32, way: impl Fn(u32) -> Duration, write: Duration, adjust: impl Fn(&mut Pace)) -> u32 {
        let (ask, queue) = mpsc::channel::<Asked>(100);
        let mut gathering = Gathering::new(queue);
        adjust(&mut gathering.pace);
        tokio::spawn(async move {
            let mut group = Vec::new();
            while gathering.take(&mut group, 1000).await > 0 {
                sleep(write).await;
                group.drain(..).for_each(|asked| asked.send(()).unwrap());
            }
        });
        let end = Instant::now() + Duration::from_secs(30);
        let mut asking = JoinSet::new();
        for caller in 0..callers {
            let (ask, way) = (ask.clone(), way(caller));
            asking.spawn(async move {
                let mut answers = 0;
                while Instant::now() < end {
                    sleep(way).await;
                    let (reply, answer) = oneshot::channel();
                    ask.send(reply).await.unwrap();
                    answer.await.unwrap();
                    answers += 1;
                }
                answers
            });
        }
        asking.join_all().await.into_iter().sum()
    }

    fn never(pace: &mut Pace) {
        pace.left = u32::MAX;
    }

    fn as_it_is(_: &mut Pace) {}

    #[tokio::test(start_paused = true)]
    async fn a_crowd_that_is_back_before_another_write_would_be_done_is_waited_for() {
        let way = |caller| MILLISECOND * (1 + caller % 5);
        let (at_once, waiting) =
            (answered(64, way, 15 * MILLISECOND, never).await, answered(64, way, 15 * MILLISECOND, as_it_is).await);
        assert!(f64::from(waiting) > 1.3 * f64::from(at_once), "{waiting} answers, and {at_once} without waiting");
    }

    #[tokio::test(start_paused = true)]
    async fn a_crowd_that_is_far_is_not() {
        let way = |caller| MILLISECOND * (20 + caller);
        let (at_once, waiting) =
            (answered(64, way, 5 * MILLISECOND, never).await, answered(64, way, 5 * MILLISECOND, as_it_is).await);
        assert!(f64::from(waiting) > 0.97 * f64::from(at_once), "{waiting} answers, and {at_once} without waiting");
    }

    #[tokio::test(start_paused = true)]
    async fn a_few_callers_never_wait_for_each_other() {
        let way = |caller| MILLISECOND * (1 + caller);
        for callers in [1, 3, 7] {
            let at_once = answered(callers, way, 5 * MILLISECOND, never).await;
            assert_eq!(answered(callers, way, 5 * MILLISECOND, as_it_is).await, at_once);
        }
    }

    #[tokio::test]
    async fn who_came_before_it_closed_is_taken_and_nobody_after() {
        let (ask, queue) = mpsc::channel(10);
        let mut gathering = Gathering::new(queue);
        let mut group = Vec::new();
        (1..=3).for_each(|asked| ask.try_send(asked).unwrap());
        assert_eq!((gathering.take(&mut group, 2).await, group.as_slice()), (2, [1, 2].as_slice()));
        gathering.close();
        assert!(ask.try_send(4).is_err());
        assert_eq!((gathering.take(&mut group, 2).await, group.as_slice()), (1, [1, 2, 3].as_slice()));
        assert_eq!(gathering.take(&mut group, 2).await, 0);
    }
}
