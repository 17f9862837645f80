// SPDX-License-Identifier: Apache-2.0

package peers

import (
	"context"
	"errors"
	"fmt"
	"time"
)

// seat is a participant and its pair.
type seat struct {
	Participant
	pair     *Pair // nil: it is out, or has not begun
	failures int
	tally    tally
	reason   error // of this shape
}

// leave ends the pair.
func (s *seat) leave() {
	if s.pair != nil {
		s.pair.Close()
		s.pair = nil
	}
}

// turn has a participant do something while those rest that would disturb.
func (s *seat) turn(do func() error) {
	s.pair.Wake()
	if err := do(); err != nil {
		s.reason = err
	}
	s.pair.Rest()
}

// begin prepares a shape, proves that it moves bytes, and warms up.
func (s *seat) begin(ctx context.Context, shape *Shape, local, remote [][]int32, seed uint64,
	slice time.Duration) error {
	if _, err := s.pair.ask(ctx, Request{Do: DoPrepare, Op: shape.Op, Size: shape.Size,
		Local: local, Remote: remote}); err != nil {
		return err
	}
	if s.Yardstick {
		return s.pair.cache(ctx, shape)
	}
	if err := s.pair.check(ctx, shape, local[0], remote[0], seed); err != nil {
		return err
	}
	if err := s.pair.cache(ctx, shape); err != nil {
		return err
	}
	_, err := s.work(ctx, slice/2)
	return err
}

// work lets the initiator work for so long.
func (s *seat) work(ctx context.Context, slice time.Duration) (Answer, error) {
	if err := s.pair.serve(ctx, true); err != nil {
		return Answer{}, err
	}
	a, err := s.pair.ask(ctx, Request{Do: DoGo, NS: int64(slice), Least: 1})
	if err == nil && (a.Ops < 1 || a.NS < 1 || len(a.Samples) < 1) {
		err = fmt.Errorf("%s: %d operations in %d ns: %w", s.Name, a.Ops, a.NS, ErrNonsense)
	}
	return a, errors.Join(err, s.pair.serve(ctx, false))
}

func (s *seat) round(ctx context.Context, shape *Shape, slice time.Duration) error {
	before := s.pair.CPU()
	a, err := s.work(ctx, slice)
	if err != nil {
		return err
	}
	s.tally.add(&a, shape.Bytes(), s.pair.CPU()-before)
	return nil
}
