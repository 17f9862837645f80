// SPDX-License-Identifier: Apache-2.0

package replay

import (
	"context"
	"fmt"
	"syscall"
	"time"

	"github.com/sluicehq/sluice/internal/figures"
	"github.com/sluicehq/sluice/internal/proc"
)

// supervisor leads all ranks step by step: a step begins when all ranks have done the one before.
type supervisor struct {
	processes
	options  *Options
	plan     *plan
	meetings meetings
	killed   time.Time // when it killed a rank
	report   *Report
}

// Run replays a trace. When it returns, all processes have ended.
func Run(ctx context.Context, o Options) (*Report, error) {
	plan, err := o.plan()
	if err != nil {
		return nil, err
	}
	if o.Say == nil {
		o.Say = func(string) {}
	}
	o.Say(fmt.Sprintf("starting %d processes, which prepare %s of memory for %d of %d layers",
		len(plan.prefill)+len(plan.decode), figures.RoundSize(plan.memory), plan.layers, plan.of))
	s := &supervisor{processes: newProcesses(o.Limit), options: &o, plan: plan,
		report: newReport(plan)}
	defer s.stop()
	for i := range len(plan.prefill) + len(plan.decode) {
		c, err := o.Start(s.sideOf(i))
		if err != nil {
			return nil, err
		}
		s.children = append(s.children, &child{Child: c})
	}
	s.aside = s.onMessage
	s.listen()
	if err := s.supervise(ctx); err != nil {
		return nil, err
	}
	return s.report, nil
}

// sideOf returns which rank of which side a child is.
func (s *supervisor) sideOf(i int) (Side, int) {
	if n := len(s.plan.prefill); i >= n {
		return DecodeSide, i - n
	}
	return PrefillSide, i
}

// supervise makes the ranks connect, runs the rounds, and adds up the results.
func (s *supervisor) supervise(ctx context.Context) error {
	began := time.Now()
	list := make([]meeting, len(s.children))
	err := s.each(ctx, kindPlan, func(i int) any {
		side, rank := s.sideOf(i)
		return assignment{*s.plan, side, rank}
	}, kindMeet, func(i int, m *proc.Message) error { return m.Decode(&list[i]) })
	if err != nil {
		return err
	}
	s.meetings = meetings{list[:len(s.plan.prefill)], list[len(s.plan.prefill):]}
	if err := s.connect(ctx); err != nil {
		return err
	}
	s.ready = true
	setup := time.Since(began)
	s.report.Seconds.Setup = setup.Seconds()
	s.options.Say(fmt.Sprintf("ready after %v: handing over %d request(s)",
		setup.Round(100*time.Millisecond), s.report.Requests))
	began = time.Now()
	done := 0
	for n := range s.plan.rounds {
		if speed := s.options.Speed; speed > 0 {
			after := time.Duration(float64(s.plan.rounds[n][0].arrival) / speed)
			if err := s.wait(ctx, began.Add(after)); err != nil {
				return err
			}
		}
		if err := s.round(ctx, n); err != nil {
			return err
		}
		if done += len(s.plan.rounds[n]); s.options.Progress != nil {
			s.options.Progress(int64(done), int64(s.report.Requests))
		}
	}
	s.report.Seconds.Replay = time.Since(began).Seconds()
	if err := s.all(ctx, kindClose, nil, kindClosed, nil); err != nil {
		return err
	}
	return s.all(ctx, kindFinish, nil, kindResult, func(i int, m *proc.Message) error {
		s.children[i].done = true
		var r result
		if err := m.Decode(&r); err != nil {
			return err
		}
		s.report.add(&r)
		return nil
	})
}

// connect makes all ranks connect, and then open their groups.
func (s *supervisor) connect(ctx context.Context) error {
	if err := s.all(ctx, kindPeers, s.meetings, kindConnected, nil); err != nil {
		return err
	}
	return s.all(ctx, kindOpen, nil, kindReady, nil)
}

// triesMax is how many times a request is handed over at most if there are faults.
const triesMax = 30

// round hands the requests of a round over. With faults it hands the failed ones over again, over
// new connections: an old one may be dead, maybe with only one side knowing it.
func (s *supervisor) round(ctx context.Context, n int) error {
	round := s.plan.rounds[n]
	for try := uint64(0); len(round) > 0; try++ {
		for i := range round {
			round[i].Try = try
		}
		mayRetry := len(s.plan.Faults) > 0 && !s.plan.killsIn(n) && try+1 < triesMax
		again, err := s.attempt(ctx, round, s.plan.killsIn(n), mayRetry)
		if err != nil || len(again) == 0 {
			return err
		}
		s.report.Retried += len(again)
		if err := s.all(ctx, kindClose, nil, kindClosed, nil); err != nil {
			return err
		}
		if err := s.connect(ctx); err != nil {
			return err
		}
		round = again
	}
	return nil
}

// attempt hands some requests over, and returns those that have to be handed over again.
func (s *supervisor) attempt(ctx context.Context, round []request, kill, mayRetry bool) (
	again []request, err error) {
	o := orders{From: make([]uint64, len(round)), Kill: kill}
	err = s.all(ctx, kindFill, round, kindFilled, func(i int, m *proc.Message) error {
		var from []uint64
		err := m.Decode(&from)
		for k := range from {
			o.From[k] = max(o.From[k], from[k])
		}
		return err
	})
	if err != nil {
		return nil, err
	}
	outcomes := make([][]outcome, len(s.children))
	began := time.Now()
	err = s.all(ctx, kindRun, o, kindEnded, func(i int, m *proc.Message) error {
		if !s.killed.IsZero() {
			took := figures.Micros(time.Since(s.killed)) / 1e3
			s.report.SlowestEndMs = max(s.report.SlowestEndMs, took)
		}
		err := m.Decode(&outcomes[i])
		if err == nil && len(outcomes[i]) != len(round) {
			err = fmt.Errorf("%s process told of %d requests", s.children[i].Name,
				len(outcomes[i]))
		}
		return err
	})
	if err != nil {
		return nil, err
	}
	took, bytes := time.Since(began), uint64(0)
	err = s.all(ctx, kindCheck, nil, kindChecked, func(_ int, m *proc.Message) error {
		var landed uint64
		err := m.Decode(&landed)
		bytes += landed
		return err
	})
	if err != nil {
		return nil, err
	}
	for i := range round {
		round[i].From = o.From[i]
	}
	return s.report.round(round, kill, mayRetry, outcomes, bytes, took), nil
}

// onMessage handles the messages of ranks that answer nothing. On kindHalfway it kills the victim
// of the plan.
func (s *supervisor) onMessage(from *child, m *proc.Message) error {
	switch {
	case m.Kind == kindProgress:
		return nil
	case m.Kind != kindHalfway || s.plan.Victim == nil:
		return fmt.Errorf("%s process sent %q", from.Name, m.Kind)
	}
	i := s.plan.Victim.Rank
	if s.plan.Victim.Side == DecodeSide {
		i += len(s.plan.prefill)
	}
	c := s.children[i]
	c.doomed, s.killed = true, time.Now()
	s.options.Say(fmt.Sprintf("killing %s (pid %d)", c.Name, c.PID))
	s.report.Killed = c.Name
	_ = syscall.Kill(c.PID, syscall.SIGKILL) // not reaped before it ends
	return nil
}
