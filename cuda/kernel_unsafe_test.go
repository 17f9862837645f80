// SPDX-License-Identifier: Apache-2.0

package cuda

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/driver/drivertest"
)

// tool finds a program, or skips and says which package has it.
func tool(t *testing.T, name, fix string) string {
	t.Helper()
	path, err := exec.LookPath(name)
	if err != nil {
		drivertest.SkipIfUnavailable(t, &driver.UnavailableError{Backend: name, Reason: err.Error(),
			Fix: fix})
	}
	return path
}

// hostBuild compiles a kernel for the CPU, within the program that runs it.
func hostBuild(t *testing.T, sources []string, compiler string, args ...string) string {
	t.Helper()
	exe := filepath.Join(t.TempDir(), "host")
	args = append(append(args, "-std=c11", "-g", "-Wall", "-Wextra", "-Werror",
		"-Wno-unknown-pragmas", "-D_GNU_SOURCE", "-o", exe), sources...)
	if out, err := exec.Command(compiler, args...).CombinedOutput(); err != nil {
		t.Fatalf("%s %s: %v\n%s", compiler, strings.Join(args, " "), err, out)
	}
	return exe
}

var sanitizers = []string{"-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"}

// TestKernelsOnTheCPU runs the kernels of gather.cu, thread after thread, over a grid of
// sizes, strides, counts, lists and launches, and compares with the obvious loop. Planted
// errors must be caught by the sanitizers.
func TestKernelsOnTheCPU(t *testing.T) {
	for _, c := range []struct {
		compiler, fix string
		flags         []string
		planted       map[string]string // a test that cannot fail proves nothing
	}{
		{"gcc", "apt-get install gcc libc6-dev", sanitizers,
			map[string]string{"index": "heap-buffer-overflow", "index dst": "heap-buffer-overflow",
				"list":      "heap-buffer-overflow",
				"alignment": "misaligned address", "bulk index": "heap-buffer-overflow",
				"bulk index dst": "heap-buffer-overflow"}},
		{"clang-19", "apt-get install clang-19", []string{"-O3"}, nil},
	} {
		t.Run(c.compiler, func(t *testing.T) {
			t.Parallel()
			exe := hostBuild(t, []string{"testdata/gather_host.c"}, tool(t, c.compiler, c.fix),
				c.flags...)
			out, err := exec.Command(exe).CombinedOutput()
			if err != nil || !regexp.MustCompile(`^\d{4,} launches\n$`).Match(out) {
				t.Errorf("%v\n%s", err, out)
			}
			for planted, want := range c.planted {
				out, err := exec.Command(exe, planted).CombinedOutput()
				where := "gather.h:"
				if strings.HasPrefix(planted, "bulk") {
					where = "ring_host.h:"
				}
				if err == nil || !strings.Contains(string(out), want) ||
					!strings.Contains(string(out), where) {
					t.Errorf("%s: %v, want %q in %s\n%s", planted, err, want, where, out)
				}
			}
		})
	}
}

// TestDigestKernelsOnTheCPU runs the kernel of digest.cu, thread after thread, over random cells,
// and compares with csrc/digest. Planted errors must be caught by the sanitizers.
func TestDigestKernelsOnTheCPU(t *testing.T) {
	sources := []string{"testdata/digest_host.c", "../csrc/digest/digest.c",
		"../csrc/digest/ways.c"}
	for compiler, flags := range map[string][]string{"gcc": sanitizers, "clang-19": {"-O3"}} {
		t.Run(compiler, func(t *testing.T) {
			t.Parallel()
			exe := hostBuild(t, sources, tool(t, compiler, "apt-get install "+compiler), flags...)
			out, err := exec.Command(exe).CombinedOutput()
			require.NoError(t, err, "%s", out)
			require.Regexp(t, `^\d{3} summed, \d{3} refused\n$`, string(out))
			if compiler != "gcc" {
				return
			}
			for _, planted := range []string{"room", "slots", "list", "keys", "alignment"} {
				out, err := exec.Command(exe, planted).CombinedOutput()
				require.Error(t, err, planted)
				require.Regexp(t, "heap-buffer-overflow|misaligned address", string(out), planted)
			}
		})
	}
}

// generators are the commands of go generate.
func generators(t *testing.T) [][]string {
	t.Helper()
	text, err := os.ReadFile("modules.go")
	require.NoError(t, err)
	var list [][]string
	for line := range strings.Lines(string(text)) {
		if command, ok := strings.CutPrefix(line, "//go:generate "); ok {
			list = append(list, strings.Fields(command))
		}
	}
	return list
}

// clangOfModules is what the committed modules were made by. Another one may choose other
// registers.
const clangOfModules = "19.1.7"

// TestModulesAreOfThisSource makes the modules again.
func TestModulesAreOfThisSource(t *testing.T) {
	commands := generators(t)
	if len(commands) != len(Modules())+2 {
		t.Fatalf("%d commands for %d modules, that of the neighbour and that of digests",
			len(commands), len(Modules()))
	}
	for _, command := range commands {
		clang := tool(t, command[0], "apt-get install clang-19")
		version, err := exec.Command(clang, "--version").Output()
		require.NoError(t, err)
		if first, _, _ := strings.Cut(string(version), "\n"); !strings.Contains(first,
			clangOfModules) {
			drivertest.SkipIfUnavailable(t, &driver.UnavailableError{Backend: command[0],
				Reason: first + " is there, the modules were made by " + clangOfModules,
				Fix:    "install that, or run go generate with this one"})
		}
		output := len(command) - 1
		committed, err := os.ReadFile(command[output])
		require.NoError(t, err)
		command[output] = filepath.Join(t.TempDir(), "module.ptx")
		if out, err := exec.Command(clang, command[1:]...).CombinedOutput(); err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
		again, err := os.ReadFile(command[output])
		require.NoError(t, err)
		if string(again) != string(committed) {
			t.Errorf("%v makes other bytes than are committed: run go generate ./cuda and commit "+
				"what it made", command)
		}
	}
}

// TestModulesSayWhatTheyNeed reads the PTX.
func TestModulesSayWhatTheyNeed(t *testing.T) {
	versions := map[int]string{11080: "7.8", 12000: "8.0"}
	param := regexp.MustCompile(`\.param \.align 8 \.b8 (sl_move_\w+)_param_0\[(\d+)\]`)
	sizes := map[string]uintptr{KernelRows: unsafe.Sizeof(args{}),
		KernelBulk: unsafe.Sizeof(args{}),
		KernelNest: unsafe.Sizeof(nested{})}
	for _, m := range Modules() {
		for _, want := range []string{".version " + versions[m.Driver],
			fmt.Sprintf(".target sm_%d\n", m.Compute),
			"ld.global.nc.L1::no_allocate.v4.u32", "st.global.cs.v4.u32", "red.global.add.u64",
			fmt.Sprintf(".maxntid %d,", rowsThreads)} {
			if !strings.Contains(m.PTX, want) {
				t.Errorf("%s: no %q", m.Name, want)
			}
		}
		// An array that the compiler cannot keep in registers would lie in memory.
		for _, bad := range []string{".local", "call", "bar.sync"} {
			if strings.Contains(m.PTX, bad) {
				t.Errorf("%s: has %q", m.Name, bad)
			}
		}
		var kernels []string
		for _, found := range param.FindAllStringSubmatch(m.PTX, -1) {
			if !slices.Contains(kernels, found[1]) {
				kernels = append(kernels, found[1])
			}
			if found[2] != fmt.Sprint(sizes[found[1]]) {
				t.Errorf("%s: %s takes %s bytes, Go has %d", m.Name, found[1], found[2],
					sizes[found[1]])
			}
		}
		slices.Sort(kernels)
		if want := slices.Sorted(slices.Values(m.Kernels)); !slices.Equal(kernels, want) {
			t.Errorf("%s has %v, want %v", m.Name, kernels, want)
		}
		if m.Compute >= 90 && !strings.Contains(m.PTX, ".shared .align 128 ") {
			t.Errorf("%s: the rings may lie at an address that bulk copies refuse", m.Name)
		}
		if bulk := strings.Contains(m.PTX,
			"cp.async.bulk.shared::cluster.global.mbarrier"); bulk != (m.Compute >= 90) {
			t.Errorf("%s: bulk copies %v", m.Name, bulk)
		}
	}
}

// TestDigestModuleSaysWhatItNeeds reads the PTX: threads that share a cell add up by shuffles
// alone, and nothing lies in memory that should be in registers.
func TestDigestModuleSaysWhatItNeeds(t *testing.T) {
	for _, want := range []string{".version 7.8", ".target sm_80\n",
		"ld.global.nc.L1::no_allocate.v4.u32", "shfl.sync.bfly.b32", "red.global.add.u64",
		fmt.Sprintf(".maxntid %d,", digestThreads), ".visible .entry " + kernelDigest + "(",
		fmt.Sprintf("%s_param_0[%d]", kernelDigest, unsafe.Sizeof(digestArgs{}))} {
		require.Contains(t, sums.PTX, want)
	}
	for _, bad := range []string{".local", "call", "bar.sync"} {
		require.NotContains(t, sums.PTX, bad)
	}
}

// TestModulesAssemble has NVIDIA's assembler look at what clang does not: inline assembly.
func TestModulesAssemble(t *testing.T) {
	ptxas := tool(t, "ptxas", "pip download nvidia-cuda-nvcc-cu12, or install a CUDA toolkit "+
		"from 12.0 on")
	for _, m := range append(Modules(), decode, sums) {
		file := filepath.Join(t.TempDir(), "module.ptx")
		require.NoError(t, os.WriteFile(file, []byte(m.PTX), 0o600))
		out, err := exec.Command(ptxas, "-v", fmt.Sprintf("-arch=sm_%d", m.Compute), "-o",
			file+".cubin", file).CombinedOutput()
		if err != nil {
			t.Fatalf("%s: %v\n%s", m.Name, err, out)
		}
		for _, kernel := range m.Kernels {
			_, says, _ := strings.Cut(string(out), "Function properties for "+kernel)
			says, _, _ = strings.Cut(says, "ptxas info    : Used")
			if !strings.Contains(says, " 0 bytes spill stores, 0 bytes spill loads") {
				t.Errorf("%s: %s spills registers:\n%s", m.Name, kernel, out)
			}
		}
	}
}
