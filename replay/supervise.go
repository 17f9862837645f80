// SPDX-License-Identifier: Apache-2.0

package replay

import (
	"context"
	"fmt"
	"time"

	"github.com/sluicehq/sluice/internal/proc"
)

// supervisor leads both processes through a replay.
type supervisor struct {
	crew    // decode, prefill
	options *Options
	plan    *Plan
	began   time.Time
	setup   time.Duration
	total   int64
	pre     PrefillResult
	dec     DecodeResult
}

// supervise returns when both results are here, or with the reason why not.
func (s *supervisor) supervise(ctx context.Context) (*Report, error) {
	s.began = time.Now()
	tick := s.listen()
	defer tick.Stop()
	for _, c := range s.children {
		s.instruct(c, kindPlan, s.plan)
	}
	for !s.children[0].done || !s.children[1].done {
		select {
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		case e := <-s.events:
			if err := s.handle(e); err != nil {
				return nil, s.blameLater(err)
			}
		case <-tick.C:
			if err := s.overdue(); err != nil {
				return nil, err
			}
		}
	}
	return merge(s.plan, &s.pre, &s.dec, s.setup), nil
}

func (s *supervisor) handle(e event) error {
	c := e.from
	if err := s.note(e); err != nil || e.end {
		return err
	}
	switch e.msg.Kind {
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
	return fmt.Errorf("%s process sent %q", c.Name, e.msg.Kind)
}

// result takes a result; that of the prefill lets the decode finish.
func (s *supervisor) result(c *child, m *proc.Message) error {
	c.done = true
	if c == s.children[0] {
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

func (s *supervisor) progress(m *proc.Message) error {
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
	if err := s.silent(); err != nil {
		return err
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

// setupLimit is for faulting in the pool: terabytes take their time.
const setupLimit = 10 * time.Minute

// late names the process that the other one waits for.
func (s *supervisor) late() string {
	decode, prefill := s.children[0], s.children[1]
	if prefill.done || s.setup == 0 && !decode.ready {
		return decode.Name
	}
	return prefill.Name
}
