/* The symbols of TensorRT's libraries that its Python bindings need to be imported.

Nothing can be built: every factory returns null. The registry of plugins is that of the lean runtime. */

#include <stddef.h>

static void *registry = NULL;

void set_plugin_registry(void *found) { registry = found; }

void *getPluginRegistry(void) { return registry; }
void *getBuilderPluginRegistry(int capability) { (void)capability; return registry; }

void *createInferBuilder_INTERNAL(void *logger, int version) { (void)logger; (void)version; return NULL; }
void *createInferRuntime_INTERNAL(void *logger, int version) { (void)logger; (void)version; return NULL; }
void *createInferRefitter_INTERNAL(void *engine, void *logger, int version)
{ (void)engine; (void)logger; (void)version; return NULL; }
void *createNvOnnxParser_INTERNAL(void *network, void *logger, int version)
{ (void)network; (void)logger; (void)version; return NULL; }
void *createNvOnnxParserRefitter_INTERNAL(void *refitter, void *logger, int version)
{ (void)refitter; (void)logger; (void)version; return NULL; }

int getNvOnnxParserVersion(void) { return 0; }
_Bool initLibNvInferPlugins(void *logger, char const *space) { (void)logger; (void)space; return 1; }
