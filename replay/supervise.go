// SPDX-License-Identifier: Apache-2.0

package replay

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/sluicehq/sluice/internal/procs"
)

// child is one of the two processes as the parent sees it.
type child struct {
	*procs.Child
	side  Side
	ready bool
	said  error // what it reported as its error
	done  bool  // its result is here
	ended bool  // it has been reaped, and all that it said was heard
}

// supervisor leads both processes through a replay.
type supervisor struct {
	options  *Options
	plan     *Plan
	limit    time.Duration
	children []*child // decode, prefill
	began    time.Time
	moved    time.Time // when there was progress last
	looked   time.Time // for what is overdue
	setup    time.Duration
	total    int64
	pre      PrefillResult
	dec      DecodeResult
}

// event is a message of a child, its end, or that it cannot be told its plan.
type event struct {
	from *child
	msg  procs.Message
	end  bool
	err  error
}

// supervise returns when both results are here, or with the reason why not.
func (s *supervisor) supervise(ctx context.Context) (*Report, error) {
	s.began = time.Now()
	events := make(chan event)
	quit := make(chan struct{})
	defer close(quit)
	for _, c := range s.children {
		go forward(c, events, quit)
		go s.instruct(c, events, quit)
	}
	tick := time.NewTicker(min(s.limit/4, 250*time.Millisecond))
	defer tick.Stop()
	s.looked = s.began
	for !s.children[0].done || !s.children[1].done {
		select {
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		case e := <-events:
			if err := s.handle(e); err != nil {
				return nil, s.blameLater(err, events)
			}
		case <-tick.C:
			if err := s.overdue(); err != nil {
				return nil, err
			}
		}
	}
	return merge(s.plan, &s.pre, &s.dec, s.setup), nil
}

func forward(c *child, events chan<- event, quit <-chan struct{}) {
	for {
		m, ok := <-c.Messages()
		select {
		case events <- event{from: c, msg: m, end: !ok}:
		case <-quit:
			return
		}
		if !ok {
			return
		}
	}
}

// instruct sends the plan. One of many requests is more than a pipe holds: a child that
// does not read it must not stop its parent, too.
func (s *supervisor) instruct(c *child, events chan<- event, quit <-chan struct{}) {
	if err := c.Send(kindPlan, s.plan); err != nil {
		select {
		case events <- event{from: c, err: err}:
		case <-quit:
		}
	}
}

func (s *supervisor) handle(e event) error {
	c := e.from
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
	s.moved = time.Now()
	switch e.msg.Kind {
	case procs.KindError:
		var text string
		if err := e.msg.Decode(&text); err != nil {
			return err
		}
		c.said = fmt.Errorf("%s process: %s", c.side, strings.TrimSpace(text))
		return c.said
	case kindReady:
		c.ready = true
		if s.children[0].ready && s.children[1].ready {
			s.setup = time.Since(s.began)
			s.options.Say(fmt.Sprintf("ready after %v: handing over %d request(s) of %d blocks",
				s.setup.Round(100*time.Millisecond), len(s.plan.Requests), s.plan.refs()))
			for _, c := range s.children {
				if err := c.Send(kindStart, nil); err != nil {
					return err
				}
			}
		}
		return nil
	case kindProgress:
		return s.progress(&e.msg)
	case kindOffload:
		return nil // a sign that it moves on
	case kindChecked:
		if s.plan.Overlap {
			return nil
		}
		err := s.children[1].Send(kindChecked, e.msg.Body)
		if s.plan.faulty() {
			return nil // that of a try that failed may come when the prefill has done all
		}
		return err
	case kindResult:
		return s.result(c, &e.msg)
	}
	return fmt.Errorf("%s process sent %q", c.side, e.msg.Kind)
}

// result takes a result; that of the prefill lets the decode finish.
func (s *supervisor) result(c *child, m *procs.Message) error {
	c.done = true
	if c.side == DecodeSide {
		return m.Decode(&s.dec)
	}
	if err := m.Decode(&s.pre); err != nil {
		return err
	}
	if s.plan.Offload != nil {
		s.options.Say("all is handed over: reading back the blocks that were spilled")
	}
	return s.children[0].Send(kindFinish, nil)
}

func (s *supervisor) progress(m *procs.Message) error {
	var done int64
	if err := m.Decode(&done); err != nil {
		return err
	}
	if s.total == 0 {
		g, err := s.plan.geometry(1, 0)
		if err != nil {
			return err
		}
		s.total = int64(s.plan.refs()) * int64(g.Layers())
	}
	if s.options.Progress != nil {
		s.options.Progress(done, s.total)
	}
	return nil
}

// overdue names the process that does not answer, or what does not move on.
func (s *supervisor) overdue() error {
	if s.wasAway() {
		return nil
	}
	for _, c := range s.children {
		if silent := c.Silent(); !c.done && silent > s.limit {
			return fmt.Errorf("%s process (pid %d) has not answered for %v: it is stopped or "+
				"starved; raise --timeout if the machine is that slow",
				c.side, c.PID, silent.Round(100*time.Millisecond))
		}
	}
	// Each process has the limit for its own waits, and says itself what ended
	// them: this is the net below.
	limit := 2 * s.limit
	if s.setup == 0 {
		limit = max(limit, setupLimit)
	}
	if idle := time.Since(s.moved); idle > limit {
		return fmt.Errorf("%s process has made no progress for %v", s.late(),
			idle.Round(100*time.Millisecond))
	}
	return nil
}

// wasAway reports whether this process itself was stopped, as by Ctrl-Z, or
// starved: it has heard no process then, and must not blame the others.
func (s *supervisor) wasAway() bool {
	now := time.Now()
	away := now.Sub(s.looked) > s.limit/2
	s.looked = now
	if away {
		s.moved = now
		for _, c := range s.children {
			c.Excuse()
		}
	}
	return away
}

// setupLimit is for faulting in the pool: terabytes take their time.
const setupLimit = 10 * time.Minute

// late is the process that the other one waits for.
func (s *supervisor) late() Side {
	decode, prefill := s.children[0], s.children[1]
	if prefill.done || s.setup == 0 && !decode.ready {
		return DecodeSide
	}
	return PrefillSide
}

// death is the error of a child that ended without its result.
func (c *child) death() error {
	if c.said != nil {
		return c.said
	}
	if err := c.ExitError(); err != nil {
		return err
	}
	return fmt.Errorf("%s process (pid %d) ended early", c.side, c.PID)
}

// blameWait is how long the parent looks for the cause of a failure: when a
// process dies, the other one complains first.
const blameWait = time.Second

// blameLater returns the cause of a failure, which may not be known yet.
func (s *supervisor) blameLater(err error, events <-chan event) error {
	late := time.After(blameWait)
	tick := time.NewTicker(blameWait / 20)
	defer tick.Stop()
	for {
		if cause := s.blame(err); cause != nil {
			return cause
		}
		select {
		case e := <-events:
			_ = s.handle(e) // noted in the child
		case <-tick.C:
		case <-late:
			return err
		}
	}
}

// blame finds a process that died without a word, is stopped or silent: that says
// more than what the other says about it. It returns nil if both are well.
func (s *supervisor) blame(err error) error {
	for _, c := range s.children {
		if c.ended && c.said == nil {
			if death := c.ExitError(); death != nil && death.Error() != err.Error() {
				return fmt.Errorf("%w (then: %w)", death, err)
			} else if death != nil {
				return death
			}
		}
		if c.Stopped() {
			return fmt.Errorf("%s process (pid %d) is stopped (then: %w)", c.side, c.PID, err)
		}
		if c.Silent() > 4*procs.AliveEvery {
			return fmt.Errorf("%s process (pid %d) does not answer (then: %w)", c.side, c.PID, err)
		}
	}
	return nil
}

// stop ends both processes at once and waits for them; one that does not answer
// has had its time.
func (s *supervisor) stop() {
	var all sync.WaitGroup
	for _, c := range s.children {
		grace := stopGrace
		if c.Silent() > s.limit {
			grace = 0
		}
		all.Go(func() { c.Stop(grace) })
	}
	all.Wait()
}
