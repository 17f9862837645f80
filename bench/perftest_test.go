// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"context"
	"errors"
	"fmt"
	"math"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/driver/drivertest"
)

// pretend makes the test binary play ucx_perftest, in the way that its value says.
const pretend = "SLUICE_BENCH_PRETEND"

func TestMain(m *testing.M) {
	if how := os.Getenv(pretend); how != "" {
		os.Exit(pretendPerfTest(how))
	}
	os.Exit(m.Run())
}

const recorded = `[1795234259.698069] [host:9528 :0]     ucp_context.c:1014 UCX  WARN  transport 'knem' is not available
iterations,50.0_percentile_lat,avg_lat,overall_lat,avg_bw,overall_bw,avg_mr,overall_mr
5000,25.763,27.262,27.262,36680.55,36680.55,36681,36681
`

func pretendPerfTest(how string) int {
	server := !slices.Contains(os.Args, "-t")
	role := "client"
	if server {
		role = "server"
	}
	if note := os.Getenv(pretend + "_PIDS"); note != "" {
		_ = os.WriteFile(filepath.Join(note, fmt.Sprint(os.Getpid())),
			[]byte(role+" "+strings.Join(os.Args[1:], " ")+"\n"+os.Getenv("UCX_TLS")), 0o600)
	}
	if how == role+" hangs" {
		if server {
			hangBehind()
		}
		time.Sleep(time.Hour)
	}
	if how == role+" fails" {
		fmt.Println("[1.2] [host:1 :0] perftest.c:405  UCX  ERROR no usable transports/devices")
		return 255
	}
	if server {
		l, err := net.Listen("tcp", "127.0.0.1:"+os.Args[slices.Index(os.Args, "-p")+1])
		if err != nil {
			return 1
		}
		if how == "server leaves" {
			time.Sleep(20 * time.Millisecond)
			return 0
		}
		_, _ = l.Accept()
		time.Sleep(time.Hour) // to be killed
	}
	switch how {
	case "client prints garbage":
		fmt.Println("iterations,50.0_percentile_lat\nno,idea\n\x00\xff")
	case "client prints for ever":
		for {
			fmt.Println(strings.Repeat("x", 1000))
		}
	case "server leaves":
		time.Sleep(time.Hour)
	default:
		fmt.Print(recorded)
	}
	return 0
}

// hangBehind starts a process that outlives this one unless the group is killed.
func hangBehind() {
	_ = exec.Command("sleep", "3600").Start()
}

func TestParsePerf(t *testing.T) {
	f, err := parsePerf([]byte(recorded), 1<<20)
	require.NoError(t, err)
	if want := 36680.55 * 1048576 / 1e9; math.Abs(f.GBps-want) > 1e-9 || f.Iterations != 5000 ||
		f.P50 != 25763*time.Nanosecond || f.Average != 27262*time.Nanosecond {
		t.Errorf("%+v, want %v GB/s", f, want)
	}
	for name, tc := range map[string]struct {
		out  string
		gbps float64
	}{
		"small messages, whose rate has too few digits": {
			"iterations,50.0_percentile_lat,avg_lat,overall_lat,avg_bw," +
				"overall_bw,avg_mr,overall_mr\n" +
				"100000,0.376,0.350,0.350,21.82,21.82,2859551,2859551\n", 2859551 * 8 / 1e9},
		"an empty last interval": {
			"iterations,50.0_percentile_lat,avg_lat,overall_lat,avg_bw," +
				"overall_bw,avg_mr,overall_mr\n" +
				"10,1,inf,1,0.00,1000.00,0,5\n", 1.048576},
		"an older one": {
			"iterations,typical_lat,avg_lat,overall_lat,avg_bw,overall_bw,avg_mr,overall_mr\r\n" +
				"10,1,1,1,1000.00,1000.00,5,5\r\n", 1.048576},
		"the last line counts": {
			"iterations,typical_lat,avg_lat,overall_lat,overall_bw,overall_mr\n" +
				"1,1,1,1,500,5\nUCX WARN a, b, c, d, e, f\n2,1,1,1,1000,5\n", 1.048576},
	} {
		if f, err := parsePerf([]byte(tc.out), 8); err != nil || math.Abs(f.GBps-tc.gbps) > 1e-9 {
			t.Errorf("%s: %+v, %v; want %v GB/s", name, f, err, tc.gbps)
		}
	}
	for _, bad := range []string{"", "iterations", "iterations,a\n", "1,2,3\n",
		"iterations,overall_bw\n1,NaN\n", "iterations,overall_bw\n1,1\n",
		"iterations,50.0_percentile_lat,overall_lat,overall_bw,overall_mr\n1,1,1,-5,1\n",
		"iterations,50.0_percentile_lat,overall_lat,overall_bw,overall_mr\n1,1,1,0.00,0\n"} {
		if f, err := parsePerf([]byte(bad), 8); !errors.Is(err, errPerfLine) {
			t.Errorf("%q: %+v, %v", bad, f, err)
		}
	}
}

// TestPerfTestUnits: of its MB/s there are fewer than of ours.
func TestPerfTestUnits(t *testing.T) {
	if got := perfGBps(1e9 / (1 << 20)); math.Abs(got-1) > 1e-12 {
		t.Errorf("1e9 bytes a second are %v GB/s", got)
	}
}

func FuzzParsePerf(f *testing.F) {
	f.Add([]byte(recorded))
	f.Fuzz(func(t *testing.T, out []byte) {
		got, err := parsePerf(out, 8)
		if err == nil && !(got.GBps > 0) {
			t.Errorf("%+v", got)
		}
		perfComplaint(out)
	})
}

// pretending returns a PerfTest of a program that behaves so, and its processes.
func pretending(t *testing.T, how string) (*PerfTest, func() map[string]string) {
	t.Helper()
	dir := t.TempDir()
	t.Setenv(pretend, how)
	t.Setenv(pretend+"_PIDS", dir)
	seen := func() map[string]string {
		all := map[string]string{}
		list, _ := os.ReadDir(dir)
		for _, e := range list {
			b, _ := os.ReadFile(filepath.Join(dir, e.Name()))
			all[e.Name()] = string(b)
		}
		return all
	}
	return &PerfTest{Path: os.Args[0], Transports: "posix,self", Time: 10 * time.Millisecond}, seen
}

func wantNoProcess(t *testing.T, seen map[string]string) {
	t.Helper()
	if len(seen) == 0 {
		t.Error("nothing was started")
	}
	for name := range seen {
		var pid int
		if _, err := fmt.Sscan(name, &pid); err != nil {
			t.Fatal(err)
		}
		// The group as well: a killed group has no member but zombies of others.
		for start := time.Now(); syscall.Kill(-pid, 0) == nil &&
			aliveGroup(pid); time.Sleep(time.Millisecond) {
			if time.Since(start) > time.Minute {
				t.Errorf("%s (%s) is left behind", name, seen[name])
				break
			}
		}
	}
}

func aliveGroup(group int) bool {
	stats, _ := filepath.Glob("/proc/[0-9]*/stat")
	for _, p := range stats {
		b, _ := os.ReadFile(p)
		_, rest, _ := strings.Cut(string(b), ") ")
		var state string
		var parent, of int
		if n, _ := fmt.Sscan(rest, &state, &parent, &of); n == 3 && of == group && state != "Z" {
			return true
		}
	}
	return false
}

func TestPerfTestRuns(t *testing.T) {
	p, seen := pretending(t, "well")
	f, err := p.Measure(t.Context(), PerfRun{Test: "ucp_put_bw", Size: 1 << 20, Window: 16})
	if err != nil || f.Iterations != 5000 {
		t.Fatalf("%+v, %v", f, err)
	}
	all := fmt.Sprint(seen())
	for _, want := range []string{"-t ucp_put_bw -s 1048576", "-O 16", "127.0.0.1 -p", "posix,self",
		"-n 16 ", "-n 366 "} {
		if !strings.Contains(all, want) {
			t.Errorf("no %q in %s", want, all)
		}
	}
	if n := len(seen()); n != 4 {
		t.Errorf("%d processes, want two each for calibration and measurement", n)
	}
	if _, err := p.Measure(t.Context(), PerfRun{Test: "ucp_put_bw", Size: 1 << 20,
		Window: 16}); err != nil || len(seen()) != 6 {
		t.Errorf("second time: %v, %d processes: it needs no calibration", err, len(seen()))
	}
	wantNoProcess(t, seen())
}

func TestPerfTestThatFails(t *testing.T) {
	defer func(d time.Duration) { perfLast = d }(perfLast)
	perfLast = 2 * time.Second
	for how, want := range map[string]string{
		"server fails": "no usable transports", "client fails": "no usable transports",
		"client prints garbage": "no line of results",
		"server leaves":         "ended early",
	} {
		t.Run(how, func(t *testing.T) {
			p, seen := pretending(t, how)
			_, err := p.Measure(t.Context(), PerfRun{Test: "ucp_get", Size: 8, Window: 1})
			if err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("error %v, want one that says %q", err, want)
			}
			wantNoProcess(t, seen())
		})
	}
}

func TestPerfTestThatHangs(t *testing.T) {
	for _, how := range []string{"server hangs", "client hangs", "client prints for ever"} {
		t.Run(how, func(t *testing.T) {
			p, seen := pretending(t, how)
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			ended := make(chan error, 1)
			go func() {
				_, err := p.Measure(ctx, PerfRun{Test: "ucp_get", Size: 8, Window: 1})
				ended <- err
			}()
			hung := strings.Fields(how)[0]
			require.Eventually(t, func() bool {
				return strings.Contains(fmt.Sprint(seen()), hung+" ")
			}, time.Minute, time.Millisecond, "no %s", hung)
			time.Sleep(50 * time.Millisecond) // into what it does for ever
			cancel()
			if err := <-ended; !errors.Is(err, context.Canceled) {
				t.Errorf("error %v", err)
			}
			wantNoProcess(t, seen())
		})
	}
}

func TestPerfTestThatIsMissing(t *testing.T) {
	p := &PerfTest{Path: filepath.Join(t.TempDir(), "ucx_perftest")}
	_, err := p.Measure(t.Context(), PerfRun{Test: "ucp_get", Size: 8, Window: 1})
	var missing *driver.UnavailableError
	if !errors.As(err, &missing) || missing.Fix != "apt-get install ucx-utils" {
		t.Errorf("error %v", err)
	}
	if _, err := p.Measure(t.Context(), PerfRun{Test: "ucp_get"}); !errors.Is(err, ErrShape) {
		t.Errorf("no size: %v", err)
	}
}

// TestPerfTestOfThisMachine runs the one of this machine over memory and over a socket.
func TestPerfTestOfThisMachine(t *testing.T) {
	for _, lane := range [][2]string{{"posix,sysv,cma,self", ""}, {"tcp", "lo"}} {
		p := &PerfTest{Transports: lane[0], Devices: lane[1], Time: 50 * time.Millisecond}
		for _, r := range []PerfRun{{"ucp_put_bw", 65536, 4}, {"ucp_get", 65536, 4},
			{"ucp_am_lat", 8, 1}, {"ucp_put_lat", 8, 1}} {
			f, err := p.Measure(t.Context(), r)
			if err != nil {
				if errors.Is(err, driver.ErrUnavailable) {
					drivertest.SkipIfUnavailable(t, err)
				}
				t.Fatalf("%+v: %v", r, err)
			}
			if f.GBps <= 0 || f.P50 <= 0 || f.Iterations < perfProbeMin {
				t.Errorf("%+v: %+v", r, f)
			}
			t.Logf("%s %s of %d: %.3f GB/s, median %v", lane[0], r.Test, r.Size, f.GBps, f.P50)
		}
	}
}
