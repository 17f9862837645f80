// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
)

// reaper is a fake whose goroutines call the engine.
type reaper struct {
	*fake
	by    func() (more bool)
	armed atomic.Bool // the engine's goroutine sleeps, or is about to
	poll  atomic.Bool // while one polls, another brings completions
	full  atomic.Bool // so many that they fill each list
	read  atomic.Bool // while one receives, another brings messages
}

func (r *reaper) Reap(by func() (more bool)) { r.by = by }

func (r *reaper) Arm() (bool, error) {
	r.armed.Store(true)
	return false, nil
}

func (r *reaper) Poll(list []driver.Completion) (int, error) {
	if r.full.Load() {
		for i := range list {
			list[i] = driver.Completion{Tag: 1 << 60} // of nobody
		}
		return len(list), nil
	}
	if r.poll.Load() {
		r.by()
	}
	return r.fake.Poll(list)
}

func (r *reaper) Receive([]driver.Message) (int, error) {
	if r.read.Load() {
		r.by()
	}
	return 0, nil
}

// A goroutine of a backend that hands over has a connection to read. While others bring more
// without end, it leaves the rest to the engine's goroutine.
func TestWhoHandsOverServesOthersForAMomentOnly(t *testing.T) {
	r := &reaper{fake: &fake{}}
	open(t, "reaper", func(c *Config) { c.Backends = []driver.Backend{r} })
	require.Eventually(t, r.armed.Load, limit, time.Millisecond)
	for _, busy := range []*atomic.Bool{&r.poll, &r.full, &r.read} {
		busy.Store(true)
		ended := make(chan bool)
		go func() { ended <- r.by() }()
		select {
		case more := <-ended:
			busy.Store(false)
			require.True(t, more, "it leaves some and says otherwise")
		case <-time.After(limit):
			busy.Store(false)
			require.Fail(t, "it serves others without end")
		}
		require.False(t, r.by())
	}
}

// What waits for room is submitted by the engine's goroutine, which the backend wakes.
func TestWhoHandsOverSubmitsNothing(t *testing.T) {
	r := &reaper{fake: &fake{manual: true, room: 1}}
	e := open(t, "reaper", func(c *Config) { c.Backends = []driver.Backend{r} })
	reg := register(t, e, "r", 1<<16)
	p, err := e.Self()
	check(t, err)
	list := []*Transfer{transfer(t, p, Write), transfer(t, p, Write)}
	for _, tr := range list {
		check(t, tr.Add(reg, 0, remote(t, p, "r"), 1<<15, 1))
		check(t, tr.Post())
	}
	require.True(t, r.by(), "it says nothing of the post that waits")
	for _, tr := range list {
		for !r.finishOne(nil) {
		}
		check(t, tr.Wait(within(t)))
	}
	require.False(t, r.by())
}
