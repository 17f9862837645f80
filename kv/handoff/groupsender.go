// SPDX-License-Identifier: Apache-2.0

package handoff

import (
	"context"
	"fmt"
	"sync"

	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/kv/layout"
)

// GroupSender sends the requests of one prefill rank. All methods may be called by any goroutine.
type GroupSender struct {
	*rank

	mu     sync.Mutex
	closed bool
	pushes map[uint64]*GroupPush // by number of the request
	links  map[uint64]*outLink   // by session
}

// NewGroupSender makes the GroupSender of a Mux for one group of peers: where there are several
// data-parallel groups, each has a plan and a GroupSender of its own.
func NewGroupSender(m *Mux, cfg GroupConfig) (*GroupSender, error) {
	r, err := newRank(m, cfg, true)
	if err != nil {
		return nil, err
	}
	s := &GroupSender{rank: r, pushes: map[uint64]*GroupPush{}, links: map[uint64]*outLink{}}
	if s.unhandle, err = m.handle(toSender, s.cfg.Peers, s.receive); err != nil {
		return nil, err
	}
	s.watch(s.lost)
	return s, nil
}

// Begin offers the tokens of a span of a request to all receiving ranks, and returns once each of
// them has opened the request; ctx and MeetTimeout bound the wait. A rank whose GroupReceiver is
// not made yet does not hear of it. The number names one hand-over for ever: another attempt needs
// another one. The tables must not change, and the blocks stay, until the GroupPush has ended.
// Errors are *EndError, except those about the arguments.
func (s *GroupSender) Begin(ctx context.Context, request uint64, t layout.Tables, in layout.Span) (
	*GroupPush, error) {
	if err := s.side.CheckTables(t, in); err != nil {
		return nil, fmt.Errorf("begin request %d: %w", request, err)
	}
	p, err := s.open(request, t, in)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeoutCause(ctx, s.cfg.MeetTimeout, engine.ErrTimeout)
	defer cancel()
	p.begin(ctx)
	close(p.ready)
	if isClosed(p.over) {
		<-p.ended
		return nil, p.Err()
	}
	return p, nil
}

func (s *GroupSender) open(request uint64, t layout.Tables, in layout.Span) (*GroupPush, error) {
	p, err := newGroupPush(s, request, t, in)
	if err != nil {
		return nil, fmt.Errorf("begin request %d: %w", request, err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	other, lost := s.lostPeer()
	switch {
	case s.closed:
		err = engine.ErrClosed
	case s.pushes[request] != nil:
		err = fmt.Errorf("it is under way: %w", engine.ErrBusy)
	case len(s.pushes) >= s.cfg.RequestsMax:
		err = fmt.Errorf("%d requests are under way: wait for some or raise RequestsMax: %w",
			len(s.pushes), engine.ErrFull)
	case lost:
		return nil, s.endOf(context.Background(), request, other, engine.ErrPeerLost)
	}
	if err != nil {
		return nil, fmt.Errorf("begin request %d: %w", request, err)
	}
	s.pushes[request] = p
	for _, l := range p.links {
		s.links[l.session] = l
	}
	s.count.begun.Add(1)
	s.running.Go(p.run)
	return p, nil
}

// forget removes a push that has ended and holds nothing any more.
func (s *GroupSender) forget(p *GroupPush) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.pushes, p.request)
	for _, l := range p.links {
		delete(s.links, l.session)
	}
}

func (s *GroupSender) all() []*GroupPush {
	s.mu.Lock()
	defer s.mu.Unlock()
	var list []*GroupPush
	for _, p := range s.pushes {
		list = append(list, p)
	}
	return list
}

// lost ends every push whose part a lost rank has not confirmed.
func (s *GroupSender) lost(other int) {
	for _, p := range s.all() {
		p.lost(p.links[other])
	}
}

// receive handles a message to a sending rank. It does not wait.
func (s *GroupSender) receive(n engine.Notification) {
	m, _ := decode(n.Data) // a push refuses what has no kind
	s.mu.Lock()
	l := s.links[m.session]
	s.mu.Unlock()
	if l == nil {
		s.count.strays.Add(1)
		return
	}
	l.push.receive(l, &m)
}

// Close aborts every GroupPush, waits for that, and closes the transfers. The engine, the Mux and
// the regions stay open. It is idempotent.
func (s *GroupSender) Close() error {
	s.mu.Lock()
	first := !s.closed
	s.closed = true
	s.mu.Unlock()
	for _, p := range s.all() {
		p.fail(&EndError{Reason: Closed}, nil)
	}
	if first {
		close(s.closing)
	}
	s.running.Wait()
	s.unhandle()
	return s.closeLines()
}
