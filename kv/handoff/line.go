// SPDX-License-Identifier: Apache-2.0

package handoff

import (
	"errors"
	"time"

	"github.com/sluicehq/sluice/engine"
)

// line keeps the idle transfers to one peer, so that a layer needs no new one.
type line struct {
	idle   []*flight
	pushes int            // that use the line
	anchor *engine.Remote // the last lease, ended: see moor
}

// flight is one layer on its way.
type flight struct {
	t      *engine.Transfer
	msg    [layerLen]byte // the engine refers to it until Reset
	layer  int
	posted time.Time
}

// launch returns an idle transfer.
func (p *Push) launch() (*flight, error) {
	s := p.s
	s.mu.Lock()
	if n := len(p.line.idle); n > 0 {
		f := p.line.idle[n-1]
		p.line.idle = p.line.idle[:n-1]
		s.mu.Unlock()
		return f, nil
	}
	s.mu.Unlock()
	t, err := s.mux.eng.NewTransfer(p.peer, engine.Write, s.cfg.Route)
	if err != nil {
		return nil, err
	}
	return &flight{t: t}, nil
}

// land takes a transfer back. One that failed is closed instead: the engine may
// have given it up.
func (p *Push) land(f *flight, err error) {
	if err != nil || f.t.Reset() != nil {
		_ = f.t.Close() // the outcome was reported already
		return
	}
	p.s.mu.Lock()
	defer p.s.mu.Unlock()
	p.line.idle = append(p.line.idle, f)
}

// moor keeps one lease of the last Push imported, instead of the one before. A
// backend that maps the peer's memory may unmap it with the last import, and
// then each request pays for all its pages anew: a quarter of the speed.
func (p *Push) moor(last *engine.Remote) {
	p.s.mu.Lock()
	before := p.line.anchor
	p.line.anchor = last
	p.s.mu.Unlock()
	if before != nil {
		_ = before.Close() // its lease has ended
	}
}

// join and leave count the pushes of a line. Precondition: s.mu is held.
func (s *Sender) join(peer *engine.Peer) *line {
	l := s.lines[peer]
	if l == nil {
		l = &line{}
		s.lines[peer] = l
	}
	l.pushes++
	return l
}

// leave forgets a push of which nothing is left: Close waits for all others. It closes the
// transfers of all lines that no push uses and whose peers are gone, be it since a push to them
// ended.
func (s *Sender) leave(ended *Push) {
	var gone []*line
	s.mu.Lock()
	delete(s.pushes, ended.session)
	ended.line.pushes--
	for p, l := range s.lines {
		if l.pushes == 0 && isLost(p) {
			delete(s.lines, p)
			gone = append(gone, l)
		}
	}
	s.mu.Unlock()
	for _, l := range gone {
		_ = l.close() // what fails fails for the same reason
	}
}

func (l *line) close() error {
	var errs []error
	for _, f := range l.idle {
		errs = append(errs, f.t.Close())
	}
	if l.anchor != nil {
		errs = append(errs, l.anchor.Close())
	}
	return errors.Join(errs...)
}

func (s *Sender) closeLines() error {
	s.mu.Lock()
	lines := s.lines
	s.lines = map[*engine.Peer]*line{}
	s.mu.Unlock()
	var errs []error
	for _, l := range lines {
		errs = append(errs, l.close())
	}
	return errors.Join(errs...)
}
