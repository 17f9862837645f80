// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"bytes"
	"context"
	"encoding/json"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// testOptions are as short as a run can be.
func testOptions() Options {
	return Options{Quick: true, Rounds: 2, Slice: time.Millisecond, Memory: 4 << 20, Idles: true,
		Idle: 10 * time.Millisecond, Limit: time.Hour}
}

func rowsOf(r *Report, peer, kind string) (list []Row) {
	for _, row := range r.Rows {
		if row.Peer == peer && row.Kind == kind {
			list = append(list, row)
		}
	}
	return list
}

func TestRunMakesRowsOfWhateverHappens(t *testing.T) {
	list := []Participant{
		fake(t, "ours", "good", Host), fake(t, "theirs", "good", Host),
		fake(t, "liar", "lies", Host),
		fake(t, "crasher", "crashes", Host), fake(t, "refuser", "refuses", Host),
		fake(t, "absent", "unsupported", Host),
		fake(t, "dead", "dies", Host), {Name: "missing", Lane: Host,
			Command: []string{"/no/such/driver"}},
	}
	list[0].Ours = true
	report, err := Run(context.Background(), list, testOptions())
	require.NoError(t, err)
	shapes := Shapes(4<<20, true)
	for _, peer := range []string{"ours", "theirs"} {
		rows := rowsOf(report, peer, KindTransfer)
		require.Len(t, rows, len(shapes), "%s has rows for shapes", peer)
		for i, row := range rows {
			if row.Shape != shapes[i] || row.Reason != "" || row.GBps <= 0 || row.P50us <= 0 ||
				row.P99us < row.P50us || row.Rounds != 2 || row.Ops < 2 {
				t.Errorf("%s, %s: %+v", peer, &shapes[i], row)
			}
		}
		for _, kind := range []string{KindIdle, KindPing} {
			require.Len(t, rowsOf(report, peer, kind), 1, "%s: rows of kind %s", peer,
				kind)
		}
	}
	wantReasons(t, report, len(shapes))
	if leads := report.Leads(Host); len(leads) != len(shapes) || leads[0].Ratio("ours") <= 0 ||
		leads[0].Theirs.Peer == "liar" {
		t.Errorf("leads: %+v", leads)
	}
	wantReadable(t, report)
}

func wantReasons(t *testing.T, report *Report, shapes int) {
	t.Helper()
	for _, row := range rowsOf(report, "liar", KindTransfer) {
		if !strings.Contains(row.Reason, "bytes that arrived are not those") || row.GBps != 0 {
			t.Errorf("liar: %+v", row)
		}
	}
	require.Len(t, rowsOf(report, "liar", KindTransfer), shapes,
		"the liar has rows for shapes")
	rows := rowsOf(report, "crasher", KindTransfer) // which is opened anew, a few times
	if last := rows[len(rows)-1]; !strings.Contains(last.Reason, "3 times") ||
		rows[0].Reason != "" || len(rows) < 6 {
		t.Errorf("crasher: %+v", rows)
	}
	for _, row := range rowsOf(report, "refuser", KindTransfer) {
		require.EqualValues(t, (row.Batch > 1), strings.Contains(row.Reason, "more pieces"),
			"refuser: %+v", row)
	}
	for peer, reason := range map[string]string{"absent": "no library", "dead": "no such device",
		"missing": "not there"} {
		rows := rowsOf(report, peer, KindTransfer)
		if len(rows) != 1 || !strings.Contains(rows[0].Reason, reason) {
			t.Errorf("%s: %+v", peer, rows)
		}
	}
}

func wantReadable(t *testing.T, report *Report) {
	t.Helper()
	var file, text bytes.Buffer
	require.NoError(t, report.Write(&file))
	again := &Report{before: report.before}
	err := json.NewDecoder(&file).Decode(again)
	if err != nil || !reflect.DeepEqual(again, report) {
		t.Errorf("a report that was written and read is another: %v", err)
	}
	require.NoError(t, report.Text(&text))
	for _, row := range report.Rows {
		require.Contains(t, text.String(), row.Peer)
	}
}

func TestRunThatIsLateSaysSo(t *testing.T) {
	o := testOptions()
	o.Limit = time.Nanosecond
	report, err := Run(context.Background(), []Participant{fake(t, "ours", "good", TCP)}, o)
	require.NoError(t, err)
	rows := rowsOf(report, "ours", KindTransfer)
	if len(rows) == 0 || rows[len(rows)-1].Reason != errLate.Error() {
		t.Errorf("rows: %+v", rows)
	}
}

// TestRunWhoseTimeEndsSaysWhatItLeftOut spends all of the time in the midst of the shapes.
func TestRunWhoseTimeEndsSaysWhatItLeftOut(t *testing.T) {
	o := testOptions()
	now := time.Now()
	o.now = func() time.Time { return now }
	o.Progress = func(what string) {
		if strings.Contains(what, "write scattered 1 x 656") {
			now = now.Add(o.Limit)
		}
	}
	report, err := Run(context.Background(), []Participant{fake(t, "ours", "good", Host)}, o)
	require.NoError(t, err)
	rows := rowsOf(report, "ours", KindTransfer)
	require.Len(t, rows, len(Shapes(o.Memory, true)), "rows for shapes")
	rows = append(rows, rowsOf(report, "ours", KindPing)...)
	for _, row := range rows {
		require.EqualValues(t, errLate.Error(), row.Reason, "%+v", row)
	}
}

func TestDriverThatHangsEndsWithTheRun(t *testing.T) {
	o := testOptions()
	o.Limit = 300 * time.Millisecond
	report, err := Run(context.Background(), []Participant{fake(t, "hung", "hangs", Host)}, o)
	require.NoError(t, err)
	if rows := rowsOf(report, "hung", KindTransfer); len(rows) != 1 ||
		rows[0].Reason != errLate.Error() {
		t.Errorf("rows: %+v", rows)
	}
}

func TestFileLaneHasShapesAlone(t *testing.T) {
	p := fake(t, "ours", "good", File)
	p.Target, p.Ours = p.Command, true
	o := testOptions()
	o.Memory = 64 << 20
	if _, err := OpenPair(context.Background(), p, 1<<20, 1<<20, 1); err != nil {
		t.Fatal(err)
	}
	report, err := Run(context.Background(), []Participant{p}, o)
	require.NoError(t, err)
	rows := rowsOf(report, "ours", KindTransfer)
	require.Len(t, rows, len(FileShapes(o.Memory, true)), "rows")
	for _, row := range rows { // the fake keeps no file
		require.Contains(t, row.Reason, "keeps no file")
	}
	if len(report.Rows) != len(rows)+1 || len(rowsOf(report, "ours", KindIdle)) != 1 {
		t.Errorf("more than transfers: %+v", report.Rows)
	}
}

func TestRunEndsWithItsContext(t *testing.T) {
	ctx, cancel := context.WithCancel(context.Background())
	o := testOptions()
	o.Progress = func(what string) {
		if strings.Contains(what, "scattered") {
			cancel()
		}
	}
	report, err := Run(ctx, []Participant{fake(t, "ours", "good", Host)}, o)
	if err != context.Canceled || len(rowsOf(report, "ours", KindIdle)) != 1 {
		t.Errorf("error %v, rows %+v", err, report.Rows)
	}
}

// TestRunThatIsInterruptedKeepsItsRounds interrupts the second round of the first shape.
func TestRunThatIsInterruptedKeepsItsRounds(t *testing.T) {
	ctx, cancel := context.WithCancel(context.Background())
	o := testOptions()
	asked := -1
	o.Progress = func(what string) {
		if strings.Contains(what, "scattered") {
			asked = 0
		}
	}
	o.now = func() time.Time {
		if asked >= 0 {
			asked++
		}
		if asked == 2 { // before it begins the shape, and before the second round
			cancel()
		}
		return time.Now()
	}
	report, err := Run(ctx, []Participant{fake(t, "ours", "good", Host)}, o)
	require.ErrorIs(t, err, context.Canceled)
	rows := rowsOf(report, "ours", KindTransfer)
	require.Len(t, rows, 1)
	require.Equal(t, 1, rows[0].Rounds)
	require.Positive(t, rows[0].GBps)
}
