// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"errors"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/driver/drivertest"
	"github.com/sluicehq/sluice/internal/testing/guest"
)

const recordedBandwidth = `Device not recognized to implement inline feature. Disabling it
---------------------------------------------------------------------------------------
                    RDMA_Write BW Test
 Dual-port       : OFF		Device         : rxe0
 Number of qps   : 1		Transport type : IB
---------------------------------------------------------------------------------------
 local address: LID 0000 QPN 0x0011 PSN 0x8f1c7a RKey 0x000256 VAddr 0x0056296ddfa000
---------------------------------------------------------------------------------------
 #bytes     #iterations    BW peak[MB/sec]    BW average[MB/sec]   MsgRate[Mpps]
 65536      200              71.60              66.19  		   0.001059
---------------------------------------------------------------------------------------
`

const recordedLatency = ` #bytes #iterations    t_min[usec]    t_max[usec]  t_typical[usec]    t_avg[usec]    t_stdev[usec]   99% percentile[usec]   99.9% percentile[usec] 
 8       500          20.03          150.34       22.33    	       23.78       	7.56   		67.48   		150.34 
`

func TestParseVerbs(t *testing.T) {
	f, err := parseVerbs([]byte(recordedBandwidth), 65536)
	if want := 66.19 * 1048576 / 1e9; err != nil || math.Abs(f.GBps-want) > 1e-9 ||
		f.Iterations != 200 ||
		f.Average.Round(time.Microsecond) != 944*time.Microsecond {
		t.Errorf("%+v, %v; want %v GB/s", f, err, want)
	}
	f, err = parseVerbs([]byte(recordedLatency), 8)
	if err != nil || f.P50 != 22330*time.Nanosecond || f.Average != f.P50 ||
		math.Abs(f.GBps-8/22330.) > 1e-9 {
		t.Errorf("%+v, %v", f, err)
	}
	if _, err = parseVerbs([]byte(strings.Replace(recordedLatency, "23.78", "inf", 1)),
		8); err != nil {
		t.Errorf("an average that is no number: %v", err)
	}
	small := " #bytes     #iterations    BW peak[MB/sec]    BW average[MB/sec]   MsgRate[Mpps]\n " +
		"8 1000 0.31 0.30 0.039321\n"
	if f, err = parseVerbs([]byte(small), 8); err != nil || math.Abs(f.GBps-0.039321*8e-3) > 1e-9 {
		t.Errorf("%+v, %v: the message rate has more digits", f, err)
	}
	for _, bad := range []string{"", "#bytes", " 8 1 2 3 4\n", "#bytes a\n8 1 2 3 4\n",
		strings.Replace(small, "0.30", "nan", 1),
		strings.Replace(small, "0.30", "-1", 1), strings.Replace(small, "0.30", "", 1),
		strings.Replace(small, "MB/sec", "Gb/sec", 2),
		strings.Replace(recordedLatency, "22.33", "inf", 1), strings.Replace(recordedBandwidth,
			" 65536 ", " 65537 ", 1)} {
		if f, err := parseVerbs([]byte(bad), 8); !errors.Is(err, errVerbsLine) {
			t.Errorf("%q: %+v, %v", bad, f, err)
		}
	}
}

func FuzzParseVerbs(f *testing.F) {
	f.Add([]byte(recordedBandwidth))
	f.Add([]byte(recordedLatency))
	f.Fuzz(func(t *testing.T, out []byte) {
		got, err := parseVerbs(out, 8)
		if err == nil && (!(got.GBps > 0) || got.P50 < 0) {
			t.Errorf("%+v", got)
		}
		(&VerbsTest{}).complaint(out)
	})
}

func TestVerbsTestSaysWhatItLacks(t *testing.T) {
	v := &VerbsTest{Dir: t.TempDir()}
	_, err := v.Measure(t.Context(), PerfRun{Test: "ib_write_bw", Size: 8, Window: 1})
	var missing *driver.UnavailableError
	if !errors.As(err, &missing) || missing.Fix != "apt-get install perftest" {
		t.Errorf("error %v", err)
	}
	program := filepath.Join(v.Dir, "ib_read_bw")
	const script = "#!/bin/sh\necho 'Device not recognized to implement inline feature. " +
		"Disabling it'\necho 'IB device none not found'\nexit 1\n"
	require.NoError(t, os.WriteFile(program, []byte(script), 0o755))
	_, err = v.Measure(t.Context(), PerfRun{Test: "ib_read_bw", Size: 8, Window: 1})
	if err == nil || !strings.Contains(err.Error(), "IB device none not found") {
		t.Errorf("error %v", err)
	}
}

// TestRealVerbsTest runs perftest over a wire of the guest, or over two devices here.
func TestRealVerbsTest(t *testing.T) {
	devices, err := guest.Devices(2)
	if err != nil {
		drivertest.SkipIfUnavailable(t, err)
	}
	gid := 3 // of RoCE v2 over IPv4 on most NICs
	if guest.Inside() {
		gid = 1
	}
	v := &VerbsTest{Client: VerbsPort{devices[0], 1, gid}, Server: VerbsPort{devices[1], 1, gid},
		Time: 200 * time.Millisecond}
	for _, r := range []PerfRun{{"ib_write_bw", 65536, 32}, {"ib_read_bw", 65536, 16},
		{"ib_write_lat", 8, 1}} {
		f, err := v.Measure(t.Context(), r)
		if err != nil {
			if errors.Is(err, driver.ErrUnavailable) {
				drivertest.SkipIfUnavailable(t, err)
			}
			t.Fatalf("%+v: %v", r, err)
		}
		if f.GBps <= 0 || f.P50 <= 0 || f.Iterations < perfProbeMin {
			t.Errorf("%+v: %+v", r, f)
		}
		t.Logf("%s of %d: %.4f GB/s, median %v", r.Test, r.Size, f.GBps, f.P50)
	}
}
