// SPDX-License-Identifier: Apache-2.0

//go:build cgo && linux

package nvml

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/topology"
)

// asProgram makes the test binary a program that examines one library: a process has one
// only, and what goes wrong in it may end it.
const asProgram = "SLUICE_TEST_NVML_LIBRARY"

// answer is what that program prints.
type answer struct {
	Findings Findings
	Err      string
	Missing  *driver.UnavailableError
	Again    bool // the second try said the same
}

func TestMain(m *testing.M) {
	library, ok := os.LookupEnv(asProgram)
	if !ok {
		os.Exit(m.Run())
	}
	f, err := Examine(library)
	a := answer{Findings: f}
	if err != nil {
		a.Err = err.Error()
		errors.As(err, &a.Missing)
	}
	again, err := Examine(library)
	a.Again = fmt.Sprint(f) == fmt.Sprint(again) && (err == nil) == (a.Err == "") &&
		(err == nil || err.Error() == a.Err)
	if err := json.NewEncoder(os.Stdout).Encode(a); err != nil {
		panic(err)
	}
}

// examine runs that program.
func examine(t *testing.T, library string) answer {
	t.Helper()
	c := exec.Command(os.Args[0])
	c.Env = append(os.Environ(), asProgram+"="+library)
	var stderr strings.Builder
	c.Stderr = &stderr
	out, err := c.Output()
	if err != nil {
		t.Fatalf("%v: %s", err, stderr.String())
	}
	var a answer
	require.NoError(t, json.Unmarshal(out, &a))
	if !a.Again {
		t.Errorf("the second try is not as the first: %s", out)
	}
	return a
}

// standIn compiles the software stand-in of NVML.
func standIn(t *testing.T, flags ...string) string {
	t.Helper()
	library := filepath.Join(t.TempDir(), "libnvidia-ml-standin.so")
	args := append([]string{"-std=c11", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC",
		"-o", library, "testdata/nvml_standin.c"}, flags...)
	if out, err := exec.Command("gcc", args...).CombinedOutput(); err != nil {
		t.Fatalf("compile the stand-in: %v\n%s", err, out)
	}
	return library
}

func TestStandIn(t *testing.T) {
	a := examine(t, standIn(t))
	f := a.Findings
	if a.Err != "" || f.Driver != "550.54.15" || f.NVML != "12.550.54.15" || f.CUDA != "12.4" ||
		len(f.Absent) != 0 || len(f.GPUs) != 2 {
		t.Fatalf("%+v", a)
	}
	want := GPU{
		Index: 0, Name: "Stand-in GPU 80GB", UUID: "GPU-00000000-0000-0000-0000-000000000000",
		Bus: "0000:19:00.0", Node: 0, Compute: "9.0",
		MemoryTotal: 80 << 30, MemoryFree: 79 << 30, MIG: "disabled, enabled after a reset",
		Link: topology.Link{Gen: 5, Width: 16}, Most: topology.Link{Gen: 5, Width: 16}, State: 0,
	}
	if got := f.GPUs[0]; fmt.Sprintf("%+v", got) != fmt.Sprintf("%+v", want) {
		t.Errorf("GPU 0 is\n%+v, want\n%+v", got, want)
	}
	g := f.GPUs[1]
	if g.Bus != "0000:9b:00.0" || g.Node != 1 || g.Link != (topology.Link{Gen: 3, Width: 8}) ||
		g.State != -1 || g.MIG != "" ||
		!slices.Equal(g.Absent, []string{"nvmlDeviceGetMigMode: Not Supported"}) {
		t.Errorf("GPU 1 is %+v", g)
	}
}

// TestOldDriver has no function of newer drivers: to call one would end the process.
func TestOldDriver(t *testing.T) {
	a := examine(t, standIn(t, "-DOLD"))
	if a.Err != "" || a.Findings.CUDA != "11.8" || len(a.Findings.GPUs) != 2 {
		t.Fatalf("%+v", a)
	}
	g := a.Findings.GPUs[1]
	want := []string{"nvmlDeviceGetMemoryAffinity: not in this driver",
		"nvmlDeviceGetMigMode: not in this driver"}
	if !slices.Equal(g.Absent, want) || g.Bus != "0000:9b:00.0" || g.Node != -1 ||
		g.Most != (topology.Link{Gen: 4, Width: 16}) || g.Compute != "9.0" {
		t.Errorf("GPU 1 is %+v, want %v to be missing", g, want)
	}
}

// TestRefusals has a GPU that answers nothing, and one that is off the bus.
func TestRefusals(t *testing.T) {
	a := examine(t, standIn(t, "-DREFUSE=3"))
	if a.Err != "" || len(a.Findings.GPUs) != 2 {
		t.Fatalf("%+v", a)
	}
	g := a.Findings.GPUs[0]
	if len(g.Absent) != 13 || g.Name != "" || g.Bus != "" || g.Node != -1 || g.State != -1 ||
		g.MemoryTotal != 0 || g.Link != (topology.Link{}) {
		t.Errorf("%d answers are missing: %+v", len(g.Absent), g)
	}
	a = examine(t, standIn(t, "-DLOST=1"))
	if a.Err != "" || len(a.Findings.GPUs) != 2 || a.Findings.GPUs[0].Bus == "" ||
		!slices.Equal(a.Findings.GPUs[1].Absent,
			[]string{"nvmlDeviceGetHandleByIndex: GPU is lost"}) {
		t.Errorf("%+v", a)
	}
}

func TestUnavailable(t *testing.T) {
	for _, c := range []struct{ name, library, reason, fix string }{
		{"no library", filepath.Join(t.TempDir(), "libnvidia-ml.so.1"),
			"cannot open shared object file", "install the NVIDIA driver"},
		{"no driver", standIn(t, "-DINIT=9"), "Driver Not Loaded", "modprobe nvidia"},
		{"two versions", standIn(t, "-DINIT=18"), "version mismatch", "reboot"},
		{"another error", standIn(t, "-DINIT=999"), "Unknown Error", "install the NVIDIA driver"},
		{"half a library", standIn(t, "-DHOLLOW"), "has no nvmlShutdown", "of one version"},
	} {
		t.Run(c.name, func(t *testing.T) {
			a := examine(t, c.library)
			if a.Missing == nil || a.Missing.Backend != "nvml" ||
				!strings.Contains(a.Missing.Reason, c.reason) ||
				!strings.Contains(a.Missing.Fix, c.fix) ||
				len(a.Findings.GPUs) != 0 {
				t.Errorf("%+v", a)
			}
		})
	}
}

// oneLibrary is the one of this process, for each run of TestOneLibrary.
var oneLibrary string

func TestOneLibrary(t *testing.T) {
	if oneLibrary == "" {
		oneLibrary = standIn(t)
	}
	first := oneLibrary
	if _, err := Examine(first); err != nil {
		t.Fatal(err)
	}
	if _, err := Examine(filepath.Join(t.TempDir(), "another.so")); !errors.Is(err,
		driver.ErrBusy) {
		t.Errorf("a second library: %v", err)
	}
	if f, err := Examine(first); err != nil || len(f.GPUs) != 2 {
		t.Errorf("the first once more: %+v, %v", f, err)
	}
}

func TestMIG(t *testing.T) {
	for want, modes := range map[string][2]bool{
		"enabled": {true, true}, "disabled": {false, false},
		"enabled, disabled after a reset": {true, false}, "disabled, enabled after a reset": {false,
			true},
	} {
		if got := migText(modes[0], modes[1]); got != want {
			t.Errorf("%v is %q, want %q", modes, got, want)
		}
	}
}
