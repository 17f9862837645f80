// SPDX-License-Identifier: Apache-2.0

package replay

import (
	"context"
	"fmt"
	"maps"
	"strings"
	"sync"
	"time"

	"github.com/sluicehq/sluice/internal/proc"
)

// processes is the parent's view of the processes of a replay.
type processes struct {
	children  []*child
	limit     time.Duration // longest time without a message or progress
	moved     time.Time     // time of the last progress
	checkedAt time.Time     // time of the last check for overdue processes
	events    chan event
	quit      chan struct{} // closed when the parent listens no more
	tick      *time.Ticker  // starts the checks for overdue processes
	ready     bool          // all have their memory
	// aside handles messages that are no answers.
	aside func(c *child, m *proc.Message) error
}

// child is one of them.
type child struct {
	*proc.Child
	said   error // the error that it reported
	done   bool  // its result has arrived
	doomed bool  // the parent is killing it
	ended  bool  // it has been reaped, and all its messages were read
}

// event is a message of a child, its end, or a failure to send to it.
type event struct {
	from *child
	msg  proc.Message
	end  bool
	err  error
}

func newProcesses(limit time.Duration) processes {
	return processes{limit: limit, moved: time.Now(), events: make(chan event),
		quit: make(chan struct{})}
}

// listen starts to read the messages of all children.
func (w *processes) listen() {
	for _, c := range w.children {
		go w.forward(c)
	}
	w.checkedAt = time.Now()
	w.tick = time.NewTicker(min(w.limit/4, 250*time.Millisecond))
}

func (w *processes) forward(c *child) {
	for {
		m, ok := <-c.Messages()
		w.deliver(event{from: c, msg: m, end: !ok})
		if !ok {
			return
		}
	}
}

func (w *processes) deliver(e event) {
	select {
	case w.events <- e:
	case <-w.quit:
	}
}

// instruct sends a message that may be larger than the buffer of a pipe. It sends in a goroutine,
// so that a child that does not read does not block the parent.
func (w *processes) instruct(c *child, kind string, body any) {
	go func() {
		if err := c.Send(kind, body); err != nil {
			w.deliver(event{from: c, err: err})
		}
	}()
}

// note handles the events that any child may cause: an error, or its end.
func (w *processes) note(e event) error {
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
func (w *processes) silent() error {
	for _, c := range w.children {
		if silent := c.Silent(); !c.done && !c.doomed && silent > w.limit {
			return fmt.Errorf("%s process (pid %d) has not answered for %v: it is stopped or "+
				"starved; raise --timeout if the machine is that slow",
				c.Name, c.PID, silent.Round(100*time.Millisecond))
		}
	}
	return nil
}

// wasAway reports whether this process itself was stopped, as by Ctrl-Z, or got no CPU time. It has
// then read no messages, and must not count the children as silent.
func (w *processes) wasAway() bool {
	now := time.Now()
	away := now.Sub(w.checkedAt) > w.limit/2
	w.checkedAt = now
	if away {
		w.moved = now
		for _, c := range w.children {
			c.Excuse()
		}
	}
	return away
}

// all is each for all children, with the same message.
func (w *processes) all(ctx context.Context, kind string, body any, want string,
	handle func(i int, m *proc.Message) error) error {
	return w.each(ctx, kind, func(int) any { return body }, want, handle)
}

// each sends a message to all children that live, and returns when they have answered with a
// message of the kind want. It passes the answers to handle, by the index in children.
func (w *processes) each(ctx context.Context, kind string, body func(i int) any, want string,
	handle func(i int, m *proc.Message) error) error {
	index := map[*child]int{} // of those that have not answered
	for i, c := range w.children {
		if !c.doomed {
			index[c] = i
			w.instruct(c, kind, body(i))
		}
	}
	w.moved = time.Now()
	for len(index) > 0 {
		err := w.event(ctx, nil, index, func(e event) error {
			if i, waits := index[e.from]; waits && e.msg.Kind == want {
				delete(index, e.from)
				if handle == nil {
					return nil
				}
				return handle(i, &e.msg)
			}
			err := w.aside(e.from, &e.msg)
			maps.DeleteFunc(index, func(c *child, _ int) bool { return c.doomed })
			return err
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// wait waits until a moment, unless something happens to a child before.
func (w *processes) wait(ctx context.Context, until time.Time) error {
	for time.Now().Before(until) {
		err := w.event(ctx, time.After(time.Until(until)), nil, func(e event) error {
			return w.aside(e.from, &e.msg)
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// event waits for one event and handles it: a message goes to handle. waits are the children that
// have to answer. An error says what has happened to a child.
func (w *processes) event(ctx context.Context, late <-chan time.Time, waits map[*child]int,
	handle func(e event) error) error {
	select {
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-late:
		return nil
	case <-w.tick.C:
		return w.overdue(waits)
	case e := <-w.events:
		err := w.note(e)
		if err == nil && !e.end && !e.from.doomed {
			err = handle(e)
		}
		if err != nil {
			return w.blameLater(err)
		}
	}
	return nil
}

// setupLimit is the limit for faulting in the pool, which takes long for terabytes.
const setupLimit = 10 * time.Minute

// overdue returns an error that names a process that does not answer or makes no progress.
func (w *processes) overdue(waits map[*child]int) error {
	if w.wasAway() {
		return nil
	}
	if err := w.silent(); err != nil {
		return err
	}
	// Each process applies the limit to its own waits, and reports what has expired. The parent
	// acts only if a process does not.
	limit := 2 * w.limit
	if !w.ready {
		limit = max(limit, setupLimit)
	}
	if idle := time.Since(w.moved); idle > limit {
		for c := range waits {
			return fmt.Errorf("%s process has made no progress for %v", c.Name,
				idle.Round(100*time.Millisecond))
		}
	}
	return nil
}

// death returns the error for a child that ended without a result.
func (c *child) death() error {
	if c.said != nil {
		return c.said
	}
	if err := c.ExitError(); err != nil {
		return err
	}
	return fmt.Errorf("%s process (pid %d) ended early", c.Name, c.PID)
}

// blameWait is how long the parent looks for the cause of a failure: when a process dies, the
// others may report errors before the parent sees the death.
const blameWait = time.Second

// blameLater returns the cause of a failure, which may not be known yet.
func (w *processes) blameLater(err error) error {
	late := time.After(blameWait)
	tick := time.NewTicker(blameWait / 20)
	defer tick.Stop()
	for {
		if cause := w.blame(err); cause != nil {
			return cause
		}
		select {
		case e := <-w.events:
			_ = w.note(e) // sets the fields of the child
		case <-tick.C:
		case <-late:
			return err
		}
	}
}

// blame finds a process that died without an error, is stopped or silent: that explains more than
// the errors of the others. It returns nil if there is none.
func (w *processes) blame(err error) error {
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

// stopGrace is how long a process may take to release its resources.
const stopGrace = 5 * time.Second

// stop ends all processes concurrently and waits for them. A process that has been silent for the
// limit gets no grace.
func (w *processes) stop() {
	close(w.quit)
	if w.tick != nil {
		w.tick.Stop()
	}
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
