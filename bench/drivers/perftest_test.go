// SPDX-License-Identifier: Apache-2.0

package drivers

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
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/bench"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/driver/drivertest"
)

// pretend makes the test binary play ucx_perftest, in the way that its value says.
const pretend = "SLUICE_BENCH_PRETEND"

// atExit gives back what tests share.
var atExit []func()

func TestMain(m *testing.M) {
	if how := os.Getenv(pretend); how != "" {
		os.Exit(pretendPerftest(how))
	}
	status := m.Run()
	for _, f := range atExit {
		f()
	}
	os.Exit(status)
}

const recorded = `[1795234259.698069] [host:9528 :0]     ucp_context.c:1014 UCX  WARN  transport 'knem' is not available
iterations,50.0_percentile_lat,avg_lat,overall_lat,avg_bw,overall_bw,avg_mr,overall_mr
5000,25.763,27.262,27.262,36680.55,36680.55,36681,36681
`

const recordedVerbs = `---------------------------------------------------------------------------------------
                    RDMA_Write BW Test
 Dual-port       : OFF		Device         : rxe0
 local address: LID 0000 QPN 0x0011 PSN 0x8f1c7a RKey 0x000256 VAddr 0x0056296ddfa000
---------------------------------------------------------------------------------------
 #bytes     #iterations    BW peak[MB/sec]    BW average[MB/sec]   MsgRate[Mpps]
 65536      200              71.60              66.19  		   0.001059
---------------------------------------------------------------------------------------
`

func pretendPerftest(how string) int {
	server := !slices.Contains(os.Args, "-t")
	role := "client"
	if server {
		role = "server"
	}
	_ = os.WriteFile(filepath.Join(os.Getenv(pretend+"_PIDS"), fmt.Sprint(os.Getpid())),
		[]byte(role+" "+strings.Join(os.Args[1:], " ")+"\n"+os.Getenv("UCX_TLS")), 0o600)
	switch how {
	case role + " fails":
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
	case "server leaves":
		time.Sleep(time.Hour)
	default:
		fmt.Print(recorded)
	}
	return 0
}

// pretending returns an end whose program behaves so, and what it has started.
func pretending(t *testing.T, how string) (*perftestEnd, func() map[string]string) {
	t.Helper()
	dir := t.TempDir()
	e := &perftestEnd{perfTool: ucxTool("posix,self", "all")}
	e.program = func(string) string { return os.Args[0] }
	e.env = append(e.env, pretend+"="+how, pretend+"_PIDS="+dir)
	return e, func() map[string]string {
		all := map[string]string{}
		list, _ := os.ReadDir(dir)
		for _, f := range list {
			b, _ := os.ReadFile(filepath.Join(dir, f.Name()))
			all[f.Name()] = string(b)
		}
		return all
	}
}

func measure(ctx context.Context, e end, size uint64, batch int) (time.Duration, error) {
	p, err := e.Prepare(bench.OpWrite, size, make([]int32, batch), nil)
	if err != nil {
		return 0, err
	}
	return p.(bench.Measurer).Measure(ctx)
}

func TestPerftestRuns(t *testing.T) {
	e, seen := pretending(t, "well")
	took, err := measure(t.Context(), e, 1<<20, 16)
	require.NoError(t, err)
	require.InDelta(t, 16*float64(1<<20)/(36680.55*1048576), took.Seconds(), 1e-7)
	all := fmt.Sprint(seen())
	// 3,668 messages take 100 ms, of which a run of 16 foretells 1,600
	for _, want := range []string{"-t ucp_put_bw -s 1048576", "-O 16", "127.0.0.1 -p", "posix,self",
		"-n 16 ", "-n 1600 ", "-n 3668 "} {
		require.Contains(t, all, want)
	}
}

func TestPerftestThatFails(t *testing.T) {
	for how, want := range map[string]string{
		"server fails": "no usable transports", "client fails": "no usable transports",
		"client prints garbage": "no line of results", "server leaves": "ended",
	} {
		t.Run(how, func(t *testing.T) {
			e, _ := pretending(t, how)
			if how == "server leaves" { // its client never ends
				defer func(d time.Duration) { perfLimit = d }(perfLimit)
				perfLimit = time.Second
			}
			_, err := measure(t.Context(), e, 8, 1)
			require.ErrorContains(t, err, want)
		})
	}
	e := &perftestEnd{perfTool: verbsTool(port{"none", 1, 0})}
	e.program = func(string) string { return filepath.Join(t.TempDir(), "ib_write_bw") }
	_, err := measure(t.Context(), e, 8, 1)
	require.ErrorIs(t, err, bench.ErrUnsupported)
	require.ErrorContains(t, err, "apt-get install perftest")
}

func TestPerftestOutput(t *testing.T) {
	const ucx = "iterations,typical_lat,avg_lat,overall_lat,overall_bw,overall_mr\n"
	const verbs = " #bytes #iterations BW peak[MB/sec] BW average[MB/sec] MsgRate[Mpps]\n"
	for _, c := range []struct {
		header, out string
		want        float64 // GB/s; 0: an error
	}{
		{"iterations", recorded, 36680.55 * 1048576 / 1e9},
		{"#bytes", recordedVerbs, 66.19 * 1048576 / 1e9},
		{"iterations", ucx + "1,1,1,1,500,5\nUCX WARN a, b, c, d, e\n2,1,inf,1,1000,5\r\n",
			1.048576},
		{"iterations", ucx + "9,1,1,1,0.02,2859\n", 2859 * 8 / 1e9},
		{"#bytes", verbs + "8 1000 0.31 0.30 0.039321\n", 0.039321 * 8e-3},
		{"iterations", "1,2,3\n", 0},
		{"iterations", ucx + "1,1,1,1,-5,1\n", 0},
		{"#bytes", verbs + "8 1000 0.31 nan 0.039321\n", 0},
		{"#bytes", strings.ReplaceAll(recordedVerbs, "MB/sec", "Gb/sec"), 0},
	} {
		got, err := parsePerf([]byte(c.out), c.header, 8)
		if math.Abs(got-c.want) > 1e-9 || errors.Is(err, bench.ErrNonsense) != (c.want == 0) {
			t.Errorf("%q: %v GB/s, %v; want %v", c.out, got, err, c.want)
		}
	}
}

// TestPerftestOfThisMachine runs the ucx_perftest of this machine over a socket.
func TestPerftestOfThisMachine(t *testing.T) {
	if _, err := exec.LookPath("ucx_perftest"); err != nil {
		drivertest.SkipIfUnavailable(t, &driver.UnavailableError{Backend: "ucx_perftest",
			Reason: err.Error(), Fix: "apt-get install ucx-utils"})
	}
	for _, op := range []string{bench.OpWrite, bench.OpRead} {
		e, _ := opened(t, "perftest", nil, bench.Request{Lane: "tcp"})
		p, err := e.Prepare(op, 65536, make([]int32, 4), nil)
		require.NoError(t, err)
		took, err := p.(bench.Measurer).Measure(t.Context())
		require.NoError(t, err)
		require.Positive(t, took)
	}
}
