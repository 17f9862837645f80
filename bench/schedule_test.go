// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestTimeThatIsLeftIsShared(t *testing.T) {
	begun := time.Now()
	clock := func() time.Time { return begun }
	end := begun.Add(10 * time.Hour)
	var untils []time.Duration
	note := func(_ context.Context, until time.Time) error {
		untils = append(untils, until.Sub(begun))
		return nil
	}
	require.NoError(t, inTurn(context.Background(), clock, end, []part{{1, note}, {3, note},
		{1, note}}))
	for i, want := range []time.Duration{2 * time.Hour, 7*time.Hour + 30*time.Minute,
		10 * time.Hour} {
		// none of them takes any
		if untils[i] != want {
			t.Errorf("part %d ends after %v, want %v", i, untils[i], want)
		}
	}
}

func TestEndOfTimeIsNoEndOfTheRun(t *testing.T) {
	ctx, cancel, end := bounds(context.Background(), time.Now(), time.Nanosecond)
	defer cancel()
	<-ctx.Done()
	if err := ended(ctx); err != nil || time.Now().Before(end) {
		t.Errorf("%v, %v", err, end)
	}
	ctx, interrupt := context.WithCancel(context.Background())
	interrupt()
	ctx, cancel, _ = bounds(ctx, time.Now(), time.Hour)
	defer cancel()
	if err := ended(ctx); err != context.Canceled {
		t.Errorf("%v", err)
	}
}
