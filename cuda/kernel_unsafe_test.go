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
				"alignment": "misaligned address", "async index": "heap-buffer-overflow",
				"async index dst": "heap-buffer-overflow"}},
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
				if err == nil || !strings.Contains(string(out), want) ||
					!strings.Contains(string(out), "gather.h:") {
					t.Errorf("%s: %v, want %q in gather.h\n%s", planted, err, want, out)
				}
			}
		})
	}
}

// TestDigestKernelsOnTheCPU runs the kernel of digest.cu, thread after thread, over random cells,
// and compares with csrc/digest. Planted errors must be caught by the sanitizers.
func TestDigestKernelsOnTheCPU(t *testing.T) {
	sources := []string{"testdata/digest_host.c", "../csrc/digest/digest.c",
		"../csrc/digest/guard.c", "../csrc/digest/ways.c"}
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

// TestLookupKernelsOnTheCPU runs the kernels of sparse.cu, the threads of a block in random order,
// over random tables and batches, and compares with csrc/sparse. Planted errors must be caught.
func TestLookupKernelsOnTheCPU(t *testing.T) {
	sources := []string{"testdata/sparse_host.c", "../csrc/sparse/sparse.c"}
	for compiler, flags := range map[string][]string{"gcc": sanitizers, "clang-19": {"-O3"}} {
		t.Run(compiler, func(t *testing.T) {
			t.Parallel()
			exe := hostBuild(t, sources, tool(t, compiler, "apt-get install "+compiler), flags...)
			out, err := exec.Command(exe).CombinedOutput()
			require.NoError(t, err, "%s", out)
			require.Regexp(t, `(?m)^\d{4} sets, \d{5,} misses, \d{3} refused$`, string(out))
			for planted, want := range map[string]string{"sets": "heap-buffer-overflow",
				"blocks": "heap-buffer-overflow", "entries": "heap-buffer-overflow",
				"misses": "heap-buffer-overflow", "barrier": "differ"} {
				if compiler != "gcc" && want != "differ" {
					continue
				}
				out, err := exec.Command(exe, planted).CombinedOutput()
				require.Error(t, err, planted)
				require.Contains(t, string(out), want, planted)
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
	if len(commands) != 3 {
		t.Fatalf("%d commands for the modules of moves, digests and lookups", len(commands))
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

// TestMovesSayWhatTheyNeed reads the PTX.
func TestMovesSayWhatTheyNeed(t *testing.T) {
	for _, want := range []string{".version 7.8", ".target sm_80\n",
		"ld.global.nc.L1::no_allocate.v4.u32", "st.global.cs.v4.u32", "red.global.add.u64",
		"cp.async.cg.shared.global",
		fmt.Sprintf("cp.async.wait_group %d;", ahead-1), ".shared .align 16 ",
		fmt.Sprintf(".maxntid %d,", rowsThreads),
		fmt.Sprintf(".maxntid %d,", asyncThreads)} {
		require.Contains(t, moves.PTX, want)
	}
	// An array that the compiler cannot keep in registers would lie in memory.
	for _, bad := range []string{".local", "call", "bar.sync"} {
		require.NotContains(t, moves.PTX, bad)
	}
	param := regexp.MustCompile(`\.param \.align 8 \.b8 (sl_move_\w+)_param_0\[(\d+)\]`)
	sizes := map[string]uintptr{KernelRows: unsafe.Sizeof(args{}),
		KernelAsync: unsafe.Sizeof(args{}), KernelNest: unsafe.Sizeof(nested{})}
	var kernels []string
	for _, found := range param.FindAllStringSubmatch(moves.PTX, -1) {
		if !slices.Contains(kernels, found[1]) {
			kernels = append(kernels, found[1])
		}
		require.Equal(t, fmt.Sprint(sizes[found[1]]), found[2], "bytes of %s", found[1])
	}
	require.ElementsMatch(t, moves.Kernels, kernels)
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

// TestLookupModuleSaysWhatItNeeds reads the PTX: threads of half a warp speak with one another by
// votes, those of a block wait without being together, and nothing lies in memory that should be in
// registers.
func TestLookupModuleSaysWhatItNeeds(t *testing.T) {
	for _, want := range []string{".version 7.8", ".target sm_80\n", "vote.sync.ballot.b32",
		"redux.sync.max.u32", "bar.warp.sync", "barrier.sync", "red.global.min.u64",
		fmt.Sprintf(".maxntid %d,", lookupThreads)} {
		require.Contains(t, lookups.PTX, want)
	}
	for _, kernel := range lookups.Kernels {
		require.Contains(t, lookups.PTX, ".visible .entry "+kernel+"(")
		require.Contains(t, lookups.PTX, fmt.Sprintf("%s_param_0[%d]", kernel,
			unsafe.Sizeof(lookupArgs{})))
	}
	for _, bad := range []string{".local", "call", "bar.sync"} {
		require.NotContains(t, lookups.PTX, bad)
	}
}

// TestModulesAssemble has NVIDIA's assembler look at what clang does not: inline assembly.
func TestModulesAssemble(t *testing.T) {
	ptxas := tool(t, "ptxas", "pip download nvidia-cuda-nvcc-cu12, or install a CUDA toolkit "+
		"from 12.0 on")
	for _, m := range []Module{moves, sums, lookups} {
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
