// SPDX-License-Identifier: Apache-2.0

package lint

import (
	"go/ast"
	"slices"
)

// environment keeps configuration in Config structs. The suite starts itself as a
// second process, and netns a test on another host; they tell it so by the environment.
func environment(f *File) []Finding {
	if f.isTest() || f.under("cmd", suite, "internal/testing") {
		return nil
	}
	reads := []string{"Getenv", "LookupEnv", "Environ", "ExpandEnv", "Setenv", "Unsetenv",
		"Clearenv"}
	var found []Finding
	f.selectors(func(x *ast.Ident, sel *ast.SelectorExpr) {
		if slices.Contains([]string{"os", "syscall", "unix"}, x.Name) &&
			slices.Contains(reads, sel.Sel.Name) {
			found = append(found, f.at(sel.Pos(),
				"%s.%s: only cmd knows the environment: take a field of a Config", x.Name,
				sel.Sel.Name))
		}
	})
	return found
}

// skipper is the one function that may skip a test, since it looks at the error.
const skipper = "SkipIfUnavailable"

// skips wants a test to run, or to say which library the machine lacks.
func skips(f *File) []Finding {
	tests := []string{"t", "b", "f", "tb"}
	calls := []string{"Skip", "Skipf", "SkipNow"}
	var found []Finding
	for _, decl := range f.tree.Decls {
		fn, ok := decl.(*ast.FuncDecl)
		if ok && fn.Name.Name == skipper && f.dir() == suite {
			continue
		}
		selectors(decl, func(x *ast.Ident, sel *ast.SelectorExpr) {
			if slices.Contains(tests, x.Name) && slices.Contains(calls, sel.Sel.Name) {
				found = append(found, f.at(sel.Pos(),
					"%s.%s: make the test run, or call drivertest.%s(t, err)", x.Name, sel.Sel.Name,
					skipper))
			}
		})
	}
	return found
}

// printing keeps libraries silent.
func printing(f *File) []Finding {
	if f.isTest() || f.under("cmd", "examples") || f.tree.Name.Name == "main" {
		return nil
	}
	found := f.forbid(func(i imported) bool { return i.name == "log" || i.name == "log/slog" },
		"a library does not log: return an error, count it, or call a hook of the Config")
	f.selectors(func(x *ast.Ident, sel *ast.SelectorExpr) {
		if x.Name == "fmt" && slices.Contains([]string{"Print", "Printf", "Println"},
			sel.Sel.Name) {
			found = append(found, f.at(sel.Pos(), "fmt.%s: a library does not print: write to an "+
				"io.Writer of the caller", sel.Sel.Name))
		}
	})
	ast.Inspect(f.tree, func(n ast.Node) bool {
		call, ok := n.(*ast.CallExpr)
		if !ok {
			return true
		}
		if name, ok := call.Fun.(*ast.Ident); ok && (name.Name == "println" ||
			name.Name == "print") {
			found = append(found, f.at(call.Pos(), "%s: take it out", name.Name))
		}
		return true
	})
	return found
}

func (f *File) selectors(visit func(x *ast.Ident, sel *ast.SelectorExpr)) {
	selectors(f.tree, visit)
}

// selectors visits each x.y where x is a plain name.
func selectors(root ast.Node, visit func(x *ast.Ident, sel *ast.SelectorExpr)) {
	ast.Inspect(root, func(n ast.Node) bool {
		if sel, ok := n.(*ast.SelectorExpr); ok {
			if x, ok := sel.X.(*ast.Ident); ok {
				visit(x, sel)
			}
		}
		return true
	})
}
