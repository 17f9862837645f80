// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"bytes"
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/internal/testing/virtual"
)

// TestInboxHoldsItsBytes: of large notifications, that the program does not read, the channel takes
// what the budget allows, and their senders wait. All arrive, in order, once it reads.
func TestInboxHoldsItsBytes(t *testing.T) { virtual.Time(t, inboxHoldsItsBytes) }

func inboxHoldsItsBytes(t *testing.T) {
	const size, budget = 256 << 10, 1 << 20
	a := open(t, "a")
	b := open(t, "b", func(c *Config) { c.NotificationBytes = budget })
	p := connect(t, a, b)
	var list []*Transfer
	for i := range 20 {
		tr := transfer(t, p, Write)
		check(t, tr.Notify(bytes.Repeat([]byte{byte(i)}, size)))
		check(t, tr.Post())
		list = append(list, tr)
	}
	until(t, "the budget is used", func() bool { return len(b.inbox) == budget/size })
	time.Sleep(5 * inboxPause) // no more comes
	require.Len(t, b.inbox, budget/size)
	for i := range 20 {
		n := next(t, b)
		require.Equal(t, byte(i), n.Data[0])
		require.LessOrEqual(t, len(b.inbox), budget/size)
	}
	for _, tr := range list {
		require.NoError(t, tr.Wait(within(t)))
	}
}

// TestInboxTakesOneOverItsBytes, and closes with one that waits.
func TestInboxTakesOneOverItsBytes(t *testing.T) { virtual.Time(t, inboxTakesOneOverItsBytes) }

func inboxTakesOneOverItsBytes(t *testing.T) {
	a := open(t, "a")
	b := open(t, "b", func(c *Config) { c.NotificationBytes = 1 })
	p := connect(t, a, b)
	check(t, p.Notify(within(t), []byte("first")))
	require.Equal(t, "first", string(next(t, b).Data))
	soon, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	for range 3 {
		_ = p.Notify(soon, []byte("more"))
	}
	check(t, b.Close())
}
