// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// noticing is a runner of so many participants, whose callers have so long.
func noticing(t *testing.T, count int, limit time.Duration) *runner {
	t.Helper()
	o := testOptions().withDefaults()
	o.Notice = limit
	r := &runner{o: o, report: newReport(o), until: time.Now().Add(time.Hour)}
	for i := range count {
		r.entrants = append(r.entrants, &entrant{Participant: fake(t,
			fmt.Sprint("theirs-", i), "good", Host)})
	}
	return r
}

func TestDeathIsTimed(t *testing.T) {
	r := noticing(t, 1, ample)
	require.NoError(t, r.killed(context.Background()))
	rows := r.report.Rows
	if len(rows) != 1 || rows[0].Kind != KindKilled || !strings.Contains(rows[0].Said, "gone") ||
		rows[0].Reason != "" || rows[0].Seconds >= ample.Seconds() {
		t.Errorf("%+v", rows)
	}
}

// TestFrozenPairsSleepTogether: more than at once, in the order of the list.
func TestFrozenPairsSleepTogether(t *testing.T) {
	const count = frozenAtOnce + 1
	r := noticing(t, count, 100*time.Millisecond)
	r.entrants[0].failures = failuresMax // it is out
	require.NoError(t, r.frozen(context.Background()))
	if len(r.report.Rows) != count-1 {
		t.Fatalf("%d rows", len(r.report.Rows))
	}
	for i, row := range r.report.Rows {
		if row.Peer != fmt.Sprint("theirs-", i+1) || row.Kind != KindFrozen ||
			!strings.Contains(row.Reason, "not noticed within 100ms") {
			t.Errorf("%d: %+v", i, row)
		}
	}
}

func TestFrozenPairThatDoesNotFitIsLeftOut(t *testing.T) {
	r := noticing(t, 2, 2*time.Hour)
	require.NoError(t, r.frozen(context.Background()))
	if rows := r.report.Rows; len(rows) != 2 || rows[0].Reason != errLate.Error() {
		t.Errorf("%+v", rows)
	}
}

func TestKilledEndsWithItsContext(t *testing.T) {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	r := noticing(t, 2, ample)
	if err := r.frozen(ctx); err != context.Canceled {
		t.Errorf("%v", err)
	}
	if err := r.killed(ctx); err != context.Canceled {
		t.Errorf("%v", err)
	}
}
