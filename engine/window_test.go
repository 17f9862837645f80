// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/backends/mem"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/engine/internal/exchange"
	"github.com/sluicehq/sluice/internal/hostmem"
	"github.com/sluicehq/sluice/internal/testing/leak"
)

// rawConn is a connection to an engine by a program that has no engine of its own.
type rawConn struct {
	b   *mem.Backend
	p   driver.Peer
	tag uint64
}

// dialRaw connects and says a hello in the name of an engine.
func dialRaw(t testing.TB, to, as *Engine, show exchange.Secret) *rawConn {
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
	c.say(t, []byte{exchange.IsWindowAsk})
	var msgs [1]driver.Message
	until(t, "the owner answers", func() bool {
		n, _ := c.b.Receive(msgs[:])
		return n > 0
	})
	answer := msgs[0].Data
	require.EqualValues(t, exchange.IsWindow, answer[0])
	if answer[1] > 0 {
		return nil
	}
	return exchange.ParseOutcome(answer[3:])
}

// TestWindowsOfAnotherName has connections claim to be an engine and take windows: that engine
// has its own all the same.
func TestWindowsOfAnotherName(t *testing.T) {
	leak.Check(t, hostmem.InUse)
	a, b := newHost(t, "a"), newHost(t, "b")
	for range windowsMax + 1 {
		require.NoError(t, dialRaw(t, b.e, a.e, exchange.Secret{}).askWindow(t))
	}
	p := connect(t, a.e, b.e)
	tr := transfer(t, p, Write)
	check(t, tr.Add(a.hbm, 0, remote(t, p, "hbm"), 0, 1))
	run(t, tr)
}

// TestWindowsOfOneTicket are bounded, refused with the reason, and counted down again; another
// engine has its own.
func TestWindowsOfOneTicket(t *testing.T) {
	leak.Check(t, hostmem.InUse)
	a, b := newHost(t, "a"), newHost(t, "b")
	own := b.e.issueTicket("host a")
	var list []*rawConn
	for range windowsMax {
		c := dialRaw(t, b.e, a.e, own.secret)
		require.NoError(t, c.askWindow(t))
		list = append(list, c)
	}
	more := dialRaw(t, b.e, a.e, own.secret)
	err := more.askWindow(t)
	require.ErrorIs(t, err, ErrFull)
	require.ErrorContains(t, err, fmt.Sprintf("%d windows already", windowsMax))
	p := connect(t, a.e, b.e)
	tr := transfer(t, p, Write)
	check(t, tr.Add(a.hbm, 0, remote(t, p, "hbm"), 0, 1))
	run(t, tr)
	require.NoError(t, list[0].p.Close())
	until(t, "room again", func() bool { return more.askWindow(t) == nil })
}

// TestWindowsOfOneHost are bounded, however often it dials: others have theirs.
func TestWindowsOfOneHost(t *testing.T) {
	leak.Check(t, hostmem.InUse)
	const most = windowsMax + 1
	a := newHost(t, "a")
	b := newHost(t, "b", func(c *Config) { c.StagingBytes = 2 * most * slotsMax * slotBytes })
	ask := func(origin string) (*rawConn, error) {
		c := dialRaw(t, b.e, a.e, b.e.issueTicket(origin).secret)
		return c, c.askWindow(t)
	}
	first, err := ask("host a")
	require.NoError(t, err)
	for range most - 1 {
		_, err = ask("host a")
		require.NoError(t, err)
	}
	more, err := ask("host a")
	require.ErrorIs(t, err, ErrFull)
	require.ErrorContains(t, err, "host a has 5 windows already, half of Config.StagingBytes")
	_, err = ask("host b")
	require.NoError(t, err)
	require.NoError(t, first.p.Close())
	until(t, "room again", func() bool { return more.askWindow(t) == nil })
}

// TestWindowsWithoutTicket leave half of the memory to engines that show one, once there are such.
func TestWindowsWithoutTicket(t *testing.T) {
	leak.Check(t, hostmem.InUse)
	const most = windowsMax + 1
	a := newHost(t, "a")
	b := newHost(t, "b", func(c *Config) { c.StagingBytes = 2 * most * slotsMax * slotBytes })
	own := b.e.issueTicket("host a")
	first := dialRaw(t, b.e, a.e, exchange.Secret{})
	require.NoError(t, first.askWindow(t))
	for range most - 1 {
		require.NoError(t, dialRaw(t, b.e, a.e, exchange.Secret{}).askWindow(t))
	}
	more := dialRaw(t, b.e, a.e, exchange.Secret{})
	err := more.askWindow(t)
	require.ErrorIs(t, err, ErrFull)
	require.ErrorContains(t, err, "what shows no ticket has 5 windows already")
	require.NoError(t, dialRaw(t, b.e, a.e, own.secret).askWindow(t))
	require.NoError(t, first.p.Close())
	until(t, "room again", func() bool { return more.askWindow(t) == nil })
}

// shortAnswers is mem that takes short answers alone.
type shortAnswers struct {
	*mem.Backend
	most int
}

func (n shortAnswers) Answer(conn uint64, b []byte) error {
	if len(b) > n.most {
		return fmt.Errorf("answer of %d bytes, at most %d: %w", len(b), n.most, ErrBounds)
	}
	return n.Backend.Answer(conn, b)
}

// TestAnswersTooLong has a peer that takes only short answers: it is told so, and does not wait
// for what never comes.
func TestAnswersTooLong(t *testing.T) {
	for _, most := range []int{64, 1 + exchange.HopName + 1} {
		t.Run(fmt.Sprint(most), func(t *testing.T) {
			inner, err := mem.New(mem.Config{})
			require.NoError(t, err)
			a, b := newHost(t, "a"), newHostOver(t, shortAnswers{inner, most}, "b")
			p := connect(t, a.e, b.e)
			err = transfer(t, p, Write).Add(a.hbm, 0, remote(t, p, "hbm"), 0, 1)
			require.Error(t, err)
			require.NotErrorIs(t, err, ErrTimeout)
			require.NotContains(t, err.Error(), "no answer")
		})
	}
}
