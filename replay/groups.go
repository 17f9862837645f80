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

// groupSupervisor leads all ranks, step by step: each step begins when all have done the last.
type groupSupervisor struct {
	processes
	options *GroupOptions
	plan    *groupPlan
	killed  time.Time // when a rank was
	report  *Report
}

// RunGroups replays between two groups of ranks. When it returns, all processes are gone.
func RunGroups(ctx context.Context, o GroupOptions) (*Report, error) {
	plan, err := o.plan()
	if err != nil {
		return nil, err
	}
	if o.Say == nil {
		o.Say = func(string) {}
	}
	o.Say(fmt.Sprintf("starting %d processes, which prepare %s of memory for %d of %d layers",
		len(plan.prefill)+len(plan.decode), figures.RoundSize(plan.memory), plan.layers, plan.of))
	s := &groupSupervisor{processes: newProcesses(o.Limit), options: &o, plan: plan,
		report: newGroupReport(plan)}
	defer s.stop()
	for _, g := range []struct {
		side  Side
		ranks int
	}{{PrefillSide, len(plan.prefill)}, {DecodeSide, len(plan.decode)}} {
		for rank := range g.ranks {
			c, err := o.Start(g.side, rank)
			if err != nil {
				return nil, err
			}
			s.children = append(s.children, &child{Child: c})
		}
	}
	s.aside = s.poised
	s.listen()
	if err := s.supervise(ctx); err != nil {
		return nil, err
	}
	return s.report, nil
}

// sideOf returns which rank of which side a child is.
func (s *groupSupervisor) sideOf(i int) (Side, int) {
	if n := len(s.plan.prefill); i >= n {
		return DecodeSide, i - n
	}
	return PrefillSide, i
}

func (s *groupSupervisor) supervise(ctx context.Context) error {
	began := time.Now()
	if err := s.meet(ctx); err != nil {
		return err
	}
	s.report.Seconds.Setup = time.Since(began).Seconds()
	requests := 0
	for _, round := range s.plan.Rounds {
		requests += len(round)
	}
	s.options.Say(fmt.Sprintf("ready after %v: handing over %d request(s)",
		time.Since(began).Round(100*time.Millisecond), requests))
	done := 0
	for n := range s.plan.Rounds {
		if err := s.round(ctx, n); err != nil {
			return err
		}
		if done += len(s.plan.Rounds[n]); s.options.Progress != nil {
			s.options.Progress(int64(done), int64(requests))
		}
	}
	if err := s.all(ctx, kindClose, nil, kindClosed, nil); err != nil {
		return err
	}
	err := s.all(ctx, kindFinish, nil, kindResult, func(i int, m *proc.Message) error {
		s.children[i].done = true
		var r groupRankResult
		if err := m.Decode(&r); err != nil {
			return err
		}
		s.report.add(&r)
		return nil
	})
	s.report.Seconds.Replay = time.Since(began).Seconds() - s.report.Seconds.Setup
	return err
}

// meet has all ranks connect.
func (s *groupSupervisor) meet(ctx context.Context) error {
	meetings := make([]groupMeeting, len(s.children))
	err := s.each(ctx, s.children, kindPlan, func(i int) any {
		side, rank := s.sideOf(i)
		return groupTold{*s.plan, side, rank}
	}, kindMeet, func(i int, m *proc.Message) error { return m.Decode(&meetings[i]) })
	if err != nil {
		return err
	}
	senders := len(s.plan.prefill)
	peers := groupPeers{meetings[:senders], meetings[senders:]}
	if err := s.all(ctx, kindPeers, peers, kindConnected, nil); err != nil {
		return err
	}
	err = s.all(ctx, kindOpen, nil, kindReady, nil)
	s.ready = true
	return err
}

// round hands some requests over.
func (s *groupSupervisor) round(ctx context.Context, n int) error {
	if err := s.all(ctx, kindFill, n, kindFilled, nil); err != nil {
		return err
	}
	outcomes := make([][]groupOutcome, len(s.children))
	began := time.Now()
	err := s.all(ctx, kindRun, nil, kindEnded, func(i int, m *proc.Message) error {
		if !s.killed.IsZero() {
			took := figures.Micros(time.Since(s.killed)) / 1e3
			s.report.SlowestEndMs = max(s.report.SlowestEndMs, took)
		}
		err := m.Decode(&outcomes[i])
		if err == nil && len(outcomes[i]) != len(s.plan.Rounds[n]) {
			err = fmt.Errorf("%s process told of %d requests", s.children[i].Name,
				len(outcomes[i]))
		}
		return err
	})
	if err != nil {
		return err
	}
	took, bytes := time.Since(began), uint64(0)
	err = s.all(ctx, kindCheck, nil, kindChecked, func(_ int, m *proc.Message) error {
		var landed uint64
		err := m.Decode(&landed)
		bytes += landed
		return err
	})
	s.report.round(s.plan, n, outcomes, bytes, took)
	return err
}

// poised kills the rank that was chosen for it, once another one says that it may be done.
func (s *groupSupervisor) poised(from *child, m *proc.Message) error {
	if m.Kind != kindPoised || s.plan.Victim == nil {
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
