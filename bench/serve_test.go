// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

// slowEnd has operations of a second each, which need another second before.
type slowEnd struct {
	fakeEnd
	posted []int
}

type slowPosting struct {
	*slowEnd
	number int
	ready  bool
}

func (p *slowPosting) Reset(context.Context) error {
	time.Sleep(time.Second)
	p.ready = true
	return nil
}

func (p *slowPosting) Post(context.Context) error {
	if !p.ready {
		return ErrNonsense
	}
	time.Sleep(time.Second)
	p.ready = false
	p.posted = append(p.posted, p.number)
	return nil
}

func (p *slowPosting) Close() error { return nil }

func (e *slowEnd) Remark() string { return "slow" }

// TestLoopCountsPostsAlone, and goes on with the operation at which it ended before.
func TestLoopCountsPostsAlone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := &slowEnd{}
		s := &server{end: e, postings: []Posting{&slowPosting{slowEnd: e},
			&slowPosting{slowEnd: e, number: 1}, &slowPosting{slowEnd: e, number: 2}}}
		for range 2 {
			a, err := s.loop(&Request{NS: 1, Least: 2})
			require.NoError(t, err)
			require.Equal(t, []int64{1e9, 1e9}, a.Samples)
			require.Equal(t, int64(2e9), a.NS)
			require.Equal(t, "slow", a.Text)
		}
		require.Equal(t, []int{0, 1, 2, 0}, e.posted)
		_, err := s.loop(&Request{NS: 1, Threads: 2})
		require.ErrorIs(t, err, ErrUnsupported)
		_, err = s.prepare(&Request{Op: OpMatch})
		require.ErrorIs(t, err, ErrUnsupported, "it has no keys")
	})
}
