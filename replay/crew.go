// SPDX-License-Identifier: Apache-2.0

package replay

import (
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/sluicehq/sluice/internal/proc"
)

// crew is the processes of a replay as their parent sees them.
type crew struct {
	children []*child
	limit    time.Duration // without a sign of life
	moved    time.Time     // when there was progress last
	looked   time.Time     // for what is overdue
	events   chan event
	quit     chan struct{} // closed when the parent listens no more
}

// child is one of them.
type child struct {
	*proc.Child
	ready  bool
	said   error // what it reported as its error
	done   bool  // its result is here
	doomed bool  // the parent kills it
	ended  bool  // it has been reaped, and all that it said was heard
}

// event is a message of a child, its end, or that it cannot be told something.
type event struct {
	from *child
	msg  proc.Message
	end  bool
	err  error
}

func newCrew(limit time.Duration) crew {
	return crew{limit: limit, moved: time.Now(), events: make(chan event),
		quit: make(chan struct{})}
}

// listen has all children heard, and returns what says when to look for what is overdue.
func (w *crew) listen() *time.Ticker {
	for _, c := range w.children {
		go w.forward(c)
	}
	w.looked = time.Now()
	return time.NewTicker(min(w.limit/4, 250*time.Millisecond))
}

func (w *crew) forward(c *child) {
	for {
		m, ok := <-c.Messages()
		w.tell(event{from: c, msg: m, end: !ok})
		if !ok {
			return
		}
	}
}

func (w *crew) tell(e event) {
	select {
	case w.events <- e:
	case <-w.quit:
	}
}

// instruct sends something that may be more than a pipe holds: a child that does not read it
// must not stop its parent, too.
func (w *crew) instruct(c *child, kind string, body any) {
	go func() {
		if err := c.Send(kind, body); err != nil {
			w.tell(event{from: c, err: err})
		}
	}()
}

// note takes what any child may say: that it fails, or ends.
func (w *crew) note(e event) error {
	c := e.from
	if c.doomed {
		c.ended = c.ended || e.end
		return nil
	}
	if e.err != nil {
		return e.err
	}
	if e.end {
		c.ended = true
		if c.done {
			return nil
		}
		return c.death()
	}
	w.moved = time.Now()
	if e.msg.Kind != proc.KindError {
		return nil
	}
	var text string
	if err := e.msg.Decode(&text); err != nil {
		return err
	}
	c.said = fmt.Errorf("%s process: %s", c.Name, strings.TrimSpace(text))
	return c.said
}

// silent names a process that does not answer.
func (w *crew) silent() error {
	for _, c := range w.children {
		if silent := c.Silent(); !c.done && !c.doomed && silent > w.limit {
			return fmt.Errorf("%s process (pid %d) has not answered for %v: it is stopped or "+
				"starved; raise --timeout if the machine is that slow",
				c.Name, c.PID, silent.Round(100*time.Millisecond))
		}
	}
	return nil
}

// wasAway reports whether this process itself was stopped, as by Ctrl-Z, or
// starved: it has heard no process then, and must not blame the others.
func (w *crew) wasAway() bool {
	now := time.Now()
	away := now.Sub(w.looked) > w.limit/2
	w.looked = now
	if away {
		w.moved = now
		for _, c := range w.children {
			c.Excuse()
		}
	}
	return away
}

// death is the error of a child that ended without its result.
func (c *child) death() error {
	if c.said != nil {
		return c.said
	}
	if err := c.ExitError(); err != nil {
		return err
	}
	return fmt.Errorf("%s process (pid %d) ended early", c.Name, c.PID)
}

// blameWait is how long the parent looks for the cause of a failure: when a
// process dies, the others complain first.
const blameWait = time.Second

// blameLater returns the cause of a failure, which may not be known yet.
func (w *crew) blameLater(err error) error {
	late := time.After(blameWait)
	tick := time.NewTicker(blameWait / 20)
	defer tick.Stop()
	for {
		if cause := w.blame(err); cause != nil {
			return cause
		}
		select {
		case e := <-w.events:
			_ = w.note(e) // noted in the child
		case <-tick.C:
		case <-late:
			return err
		}
	}
}

// blame finds a process that died without a word, is stopped or silent: that says
// more than what others say about it. It returns nil if all are well.
func (w *crew) blame(err error) error {
	for _, c := range w.children {
		if c.doomed {
			continue
		}
		if c.ended && c.said == nil {
			if death := c.ExitError(); death != nil && death.Error() != err.Error() {
				return fmt.Errorf("%w (then: %w)", death, err)
			} else if death != nil {
				return death
			}
		}
		if c.Stopped() {
			return fmt.Errorf("%s process (pid %d) is stopped (then: %w)", c.Name, c.PID, err)
		}
		if c.Silent() > 4*proc.AliveEvery {
			return fmt.Errorf("%s process (pid %d) does not answer (then: %w)", c.Name, c.PID, err)
		}
	}
	return nil
}

// stop ends all processes at once and waits for them; one that does not answer
// has had its time.
func (w *crew) stop() {
	close(w.quit)
	var all sync.WaitGroup
	for _, c := range w.children {
		grace := stopGrace
		if c.Silent() > w.limit {
			grace = 0
		}
		all.Go(func() { c.Stop(grace) })
	}
	all.Wait()
}
