// SPDX-License-Identifier: Apache-2.0

package testkit

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/internal/clock"
)

// TestClockAdvance calls timers in the order of their times, each at its time.
func TestClockAdvance(t *testing.T) {
	c := NewClock()
	begin := c.Now()
	var at []int64
	note := func() { at = append(at, c.Now()-begin) }
	c.AfterFunc(3, note)
	first := c.AfterFunc(1, note)
	gone := c.AfterFunc(2, note)
	require.True(t, gone.Stop())
	require.False(t, gone.Stop())
	c.Advance(2)
	require.Equal(t, []int64{1}, at)
	require.False(t, first.Reset(2))
	require.True(t, first.Reset(10))
	c.Advance(20)
	require.Equal(t, []int64{1, 3, 12}, at)
	require.Equal(t, begin+22, c.Now())
}

// TestClockJump calls what came due once, with the clock at its new time.
func TestClockJump(t *testing.T) {
	c := NewClock()
	begin := c.Now()
	var at []int64
	c.AfterFunc(7, func() { at = append(at, 7) })
	var again clock.Timer
	again = c.AfterFunc(3, func() { at = append(at, c.Now()-begin); again.Reset(3) })
	require.EqualValues(t, 2, c.Next(2))
	require.EqualValues(t, 3, c.Next(time.Hour))
	c.Jump(10)
	require.Equal(t, []int64{10, 7}, at)
	require.EqualValues(t, 3, c.Next(time.Hour))
}
