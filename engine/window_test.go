// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/backends/mem"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/hostmem"
	"github.com/sluicehq/sluice/internal/testing/testkit"
	"github.com/sluicehq/sluice/internal/wire"
)

// rawConn is a connection to an engine by a program that has no engine of its own.
type rawConn struct {
	b   *mem.Backend
	p   driver.Peer
	tag uint64
}

// dialRaw connects and says a hello in the name of an engine.
func dialRaw(t testing.TB, to, as *Engine, show wire.Secret) *rawConn {
	t.Helper()
	b, err := mem.New(mem.Config{})
	require.NoError(t, err)
	t.Cleanup(func() { _ = b.Close() })
	p, err := b.Connect(within(t), to.lanes[0].b.Addr())
	require.NoError(t, err)
	c := &rawConn{b: b, p: p}
	c.say(t, as.hello(show))
	return c
}

func (c *rawConn) say(t testing.TB, msg []byte) {
	t.Helper()
	c.tag++
	check(t, c.p.Submit(c.tag, &driver.Batch{Op: Write, Tail: driver.NotifyTail, Notify: msg}))
}

// askWindow asks for staging memory and returns how the owner answers.
func (c *rawConn) askWindow(t testing.TB) error {
	t.Helper()
	c.say(t, []byte{wire.KindWindowAsk})
	var msgs [1]driver.Message
	until(t, "the owner answers", func() bool {
		n, _ := c.b.Receive(msgs[:])
		return n > 0
	})
	answer := msgs[0].Data
	require.EqualValues(t, wire.KindWindow, answer[0])
	if answer[1] > 0 {
		return nil
	}
	return wire.ParseOutcome(answer[3:])
}

// TestWindowsOfAnotherName has connections claim to be an engine and take windows: that engine
// has its own all the same.
func TestWindowsOfAnotherName(t *testing.T) {
	testkit.CheckLeaks(t, hostmem.InUse)
	a, b := newHost(t, "a"), newHost(t, "b")
	for range windowsMin + 1 {
		require.NoError(t, dialRaw(t, b.e, a.e, wire.Secret{}).askWindow(t))
	}
	p := connect(t, a.e, b.e)
	tr := transfer(t, p, Write)
	check(t, tr.Add(a.hbm, 0, remote(t, p, "hbm"), 0, 1))
	run(t, tr)
}

// TestWindowsAreBounded for one host, however often it dials, and for connections that show no
// ticket, once there are such. They are refused with the reason, counted down again, and others
// have theirs.
func TestWindowsAreBounded(t *testing.T) {
	const most = windowsMin + 1
	for want, show := range map[string]func(*Engine) wire.Secret{
		"host a has 5 windows already, half of Config.StagingBytes": func(
			b *Engine) wire.Secret {
			return b.issueTicket("host a").secret
		},
		"what shows no ticket has 5 windows already": func(*Engine) (none wire.Secret) {
			return none
		},
	} {
		t.Run(want, func(t *testing.T) {
			testkit.CheckLeaks(t, hostmem.InUse)
			a := newHost(t, "a")
			b := newHost(t, "b", func(c *Config) {
				c.StagingBytes = 2 * most * slotsMax * slotBytes
			})
			other := b.e.issueTicket("host b").secret
			var list []*rawConn
			for range most {
				conn := dialRaw(t, b.e, a.e, show(b.e))
				require.NoError(t, conn.askWindow(t))
				list = append(list, conn)
			}
			more := dialRaw(t, b.e, a.e, show(b.e))
			err := more.askWindow(t)
			require.ErrorIs(t, err, ErrFull)
			require.ErrorContains(t, err, want)
			require.NoError(t, dialRaw(t, b.e, a.e, other).askWindow(t))
			require.NoError(t, list[0].p.Close())
			until(t, "room again", func() bool { return more.askWindow(t) == nil })
		})
	}
}

// TestAnswersTooLong has a peer that takes only short answers: it is told so, and does not wait
// for what never comes.
func TestAnswersTooLong(t *testing.T) {
	for _, most := range []int{64, 1 + wire.HopName + 1} {
		t.Run(fmt.Sprint(most), func(t *testing.T) {
			a, b := newHost(t, "a"), newHostOver(t, rigged(t, mem.Config{}, rig{
				onAnswer: func(b []byte) error {
					if len(b) > most {
						return fmt.Errorf("answer of %d bytes: %w", len(b), ErrBounds)
					}
					return nil
				}}), "b")
			p := connect(t, a.e, b.e)
			err := transfer(t, p, Write).Add(a.hbm, 0, remote(t, p, "hbm"), 0, 1)
			require.Error(t, err)
			require.NotErrorIs(t, err, ErrTimeout)
			require.NotContains(t, err.Error(), "no answer")
		})
	}
}
