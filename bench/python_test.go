// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"context"
	"fmt"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/driver/drivertest"
)

// python finds an interpreter that can do what the code says: that of the system, or of the
// environments that setup.sh makes by default.
func python(t *testing.T, code string) string {
	t.Helper()
	var reasons []string
	for _, name := range []string{"python3", "../build/peers/nixl/bin/python",
		"../build/peers/sluice/bin/python"} {
		path, err := exec.LookPath(name)
		if err == nil {
			var out []byte
			if out, err = exec.Command(path, "-c", code).CombinedOutput(); err == nil {
				return path
			}
			lines := strings.Split(strings.TrimSpace(string(out)), "\n")
			err = fmt.Errorf("%s: %s", name, lines[len(lines)-1])
		}
		reasons = append(reasons, err.Error())
	}
	drivertest.SkipIfUnavailable(t, &driver.UnavailableError{Backend: "python",
		Reason: strings.Join(reasons, "; "),
		Fix: "apt-get install python3 python3-numpy; of ours, make wheel and " +
			"bench/setup.sh build/peers"})
	return ""
}

// TestOursFromPythonMovesBytes runs our own API and our face of NIXL's over what make wheel has
// built.
func TestOursFromPythonMovesBytes(t *testing.T) {
	interpreter := python(t, "import numpy, sluice.nixl")
	for _, p := range Participants(Host, Setup{Scripts: "drivers", Python: func(string) string {
		return interpreter
	}}) {
		if !p.Ours || !p.Scripted {
			continue
		}
		t.Run(p.Name, func(t *testing.T) {
			pair, err := OpenPair(context.Background(), p, 4<<20, 4<<20, 1)
			require.NoError(t, err)
			defer pair.Close()
			for _, shape := range []Shape{{Op: OpWrite, Size: 656, Batch: 64, Where: Scattered},
				{Op: OpRead, Size: 4096, Batch: 16, Where: Adjacent}} {
				shape.Spread = 4 << 20
				local, remote := shape.places()
				_, err := pair.ask(context.Background(), Request{Do: DoPrepare, Op: shape.Op,
					Size: shape.Size, Local: local[:1], Remote: remote[:1]})
				if err == nil {
					err = pair.check(context.Background(), &shape, local[0], remote[0], 1)
				}
				require.NoError(t, err, "%s", &shape)
			}
			if a, _, err := pair.ping(context.Background(), 3); err != nil || len(a.Samples) != 3 {
				t.Errorf("messages: %+v, %v", a, err)
			}
		})
	}
}

func TestScriptsAreWellFormed(t *testing.T) {
	interpreter := python(t, "pass")
	scripts, err := filepath.Glob("drivers/*.py")
	if err != nil || len(scripts) < 3 {
		t.Fatalf("scripts %v, %v", scripts, err)
	}
	args := append([]string{"-c", "import ast, sys\nfor name in sys.argv[1:]: " +
		"ast.parse(open(name).read(), name)"}, scripts...)
	if out, err := exec.Command(interpreter, args...).CombinedOutput(); err != nil {
		t.Errorf("%v: %s", err, out)
	}
}

func TestPythonLoopMovesBytesAndCountsTime(t *testing.T) {
	interpreter := python(t, "import numpy")
	p := Participant{Name: "fake", Lane: Host, Command: []string{interpreter,
		"testdata/fake_peer.py"}, Scripted: true}
	o := testOptions()
	report, err := Run(context.Background(), []Participant{p}, o)
	require.NoError(t, err)
	rows := rowsOf(report, "fake", KindTransfer)
	require.Len(t, rows, len(Shapes(o.Memory, true)), "rows for shapes: %+v", rows)
	for _, row := range rows {
		if row.Reason != "" || row.GBps <= 0 || row.P50us <= 0 || row.CPUPerGB <= 0 {
			t.Errorf("%+v", row)
		}
	}
	if rows := rowsOf(report, "fake", KindPing); len(rows) != 1 ||
		!strings.Contains(rows[0].Reason, "no notifications") {
		t.Errorf("%+v", rows)
	}
	p.Lane = TCP
	if _, err := OpenPair(context.Background(), p, 1<<20, 1<<20, 1); err == nil ||
		!strings.Contains(err.Error(), "one host alone") {
		t.Errorf("another lane: %v", err)
	}
}
